// What is looked at, kept in the address: #/step/trajectory/turn.

import * as conversation from "./conversation.js";
import { keepFor } from "./kept.js";
import { chosen, filters, showOwn, showRows, showSteps } from "./list.js";
import { byId, facts, note } from "./parts.js";
import { Gone, ask, pathOf } from "./server.js";

const POLL_MS = 2000;
const SEARCH_MS = 200;

const at = { step: null, id: null, turn: null };
let run = null;
let rows = [];
let found = null;
let loaded = null; // the trajectory that is shown: "step/id"

// ── the address ──────────────────────────────────────────────────────────────────────────────────

function address() {
  const [step, id, turn] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  return { step: step ? Number(step) : null, id: id || null, turn: turn ? Number(turn) : null };
}

function hashOf({ step, id, turn }) {
  return `#/${[step, id, turn].filter((part) => part !== null).map(encodeURIComponent).join("/")}`;
}

function replace(change) {
  Object.assign(at, change);
  history.replaceState(null, "", hashOf(at));
}

const go = (change) => { location.hash = hashOf({ step: at.step, id: null, turn: null, ...change }); };

async function route() {
  const wanted = address();
  const numbers = run.steps.map((one) => one.step);
  if (!numbers.length) return nothingStored();
  const step = wanted.step ?? numbers.at(-1);
  if (!numbers.includes(step)) {
    note(`Step ${step} is not stored; this is step ${numbers.at(-1)}.`);
    history.replaceState(null, "", hashOf({ step: numbers.at(-1), id: null, turn: null }));
    return route();
  }
  const other = step !== at.step;
  Object.assign(at, wanted, { step });
  if (other) await loadRows();
  list();
  await trajectory();
}

function nothingStored() {
  showSteps([], null);
  byId("count").textContent = "";
  conversation.showNothing([
    "No trajectories are stored in this run yet.",
    "run.trajectories_every says how often the batch of a step is kept. A run that goes on appears here by itself.",
  ]);
}

// ── the list ─────────────────────────────────────────────────────────────────────────────────────

async function loadRows() {
  const step = at.step;
  const now = (await ask(`/api/steps/${step}`)).trajectories;
  if (step !== at.step) return;
  rows = now;
  await search();
}

async function search() {
  const words = byId("search").value.trim();
  const step = at.step;
  const ids = words ? (await ask(`/api/steps/${step}/search?words=${encodeURIComponent(words)}`)).ids : null;
  if (step === at.step && words === byId("search").value.trim()) found = ids && new Set(ids);
}

const visible = () => chosen(rows, found);

function list() {
  showSteps(run.steps, at.step);
  showRows(rows, visible(), at.id, at.step);
}

// ── the conversation ─────────────────────────────────────────────────────────────────────────────

const isWide = () => matchMedia("(min-width: 821px)").matches;

async function trajectory() {
  if (at.id === null && isWide() && visible().length) {
    replace({ id: visible()[0].id, turn: null });
    list();
  }
  document.body.classList.toggle("reading", at.id !== null);
  if (at.id === null) {
    loaded = null;
    return conversation.showNothing(["Choose a trajectory."]);
  }
  const name = `${at.step}/${at.id}`;
  if (loaded !== name) {
    const whole = await ask(pathOf(at.step, at.id)).catch((error) => error);
    if (name !== `${at.step}/${at.id}`) return;
    if (whole instanceof Error) {
      loaded = null;
      conversation.showNothing([whole.message]);
      return;
    }
    loaded = name;
    draw(whole);
    byId("conversation").scrollTop = 0;
    window.scrollTo(0, 0);
    document.querySelector('#rows [aria-current="true"]')?.scrollIntoView({ block: "nearest" });
  }
  conversation.mark(at.turn);
}

function draw(whole) {
  const row = rows.find((one) => one.id === whole.id);
  const place = visible().findIndex((one) => one.id === whole.id);
  conversation.show(whole, whole.own, row ? facts(row) : "", {
    previous: () => beside(-1),
    next: () => beside(1),
    isFirst: place <= 0,
    isLast: place < 0 || place + 1 >= visible().length,
    toError,
    wrote,
  });
}

function beside(direction) {
  const shown = visible();
  const place = shown.findIndex((one) => one.id === at.id);
  const next = shown[place < 0 ? 0 : place + direction];
  if (next) go({ id: next.id });
  else note(direction > 0 ? "That was the last one of this list." : "That was the first one of this list.");
}

function toError(direction) {
  const turn = conversation.errorFrom(at.turn, direction);
  if (turn === null) return note(direction > 0 ? "No further error below." : "No error above.");
  replace({ turn });
  conversation.mark(turn);
}

// After a hint was written or removed here, or could not be.
function wrote(own) {
  if (own) {
    run.own = own;
    showOwn(own);
  }
  return quietly(refresh);
}

// ── a run that goes on ───────────────────────────────────────────────────────────────────────────

async function refresh() {
  const now = await ask("/api/run");
  const before = run;
  run = now;
  showOwn(now.own);
  if (!before.steps.length && now.steps.length) return route();
  const same = JSON.stringify([now.own, now.steps]) === JSON.stringify([before.own, before.steps]);
  if (same || at.step === null) return;
  await loadRows();
  list();
  if (loaded !== `${at.step}/${at.id}`) return;
  const whole = await ask(pathOf(at.step, at.id));
  conversation.update(whole, whole.own);
}

async function poll() {
  if (!document.hidden) await quietly(refresh);
  setTimeout(poll, POLL_MS);
}

// A server that is gone has its own message, and comes back by itself.
async function quietly(work) {
  try {
    await work();
  } catch (error) {
    if (!(error instanceof Gone)) note(error.message);
  }
}

// ── buttons and keys ─────────────────────────────────────────────────────────────────────────────

const KEYS = {
  j: () => beside(1),
  k: () => beside(-1),
  n: () => toError(1),
  p: () => toError(-1),
  h: () => {
    const turn = conversation.writeAt(at.turn);
    if (turn === null) return;
    replace({ turn });
    conversation.mark(turn, { scroll: false });
  },
  "/": () => byId("search").focus(),
};

function listen() {
  let typing = 0;
  byId("search").addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => quietly(async () => { await search(); list(); }), SEARCH_MS);
  });
  byId("search").addEventListener("keydown", (event) => {
    if (event.key === "Escape") event.target.blur();
  });
  for (const button of document.querySelectorAll("[data-filter]")) {
    button.addEventListener("click", () => {
      filters[button.dataset.filter] = !filters[button.dataset.filter];
      list();
    });
  }
  byId("step").addEventListener("change", (event) => go({ step: Number(event.target.value) }));
  const stepBy = (direction) => () => {
    const place = run.steps.findIndex((one) => one.step === at.step);
    go({ step: run.steps[place + direction].step });
  };
  byId("earlier").addEventListener("click", stepBy(-1));
  byId("later").addEventListener("click", stepBy(1));
  byId("copy").addEventListener("click", copy);
  window.addEventListener("hashchange", () => quietly(route));
  document.addEventListener("keydown", (event) => {
    const isText = event.target.closest("input, textarea, select");
    if (isText || event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
    event.preventDefault();
    KEYS[event.key]();
  });
}

async function copy() {
  try {
    await navigator.clipboard.writeText(`${byId("recipe").textContent}\n`);
    note("Copied.");
  } catch {
    getSelection().selectAllChildren(byId("recipe"));
    note("Selected; copy it with the keyboard.");
  }
}

async function start() {
  run = await ask("/api/run");
  keepFor(run.path);
  document.title = `${run.name} · courtside`;
  byId("name").textContent = run.name;
  byId("summary").textContent = run.summary;
  showOwn(run.own);
  listen();
  await quietly(route);
  setTimeout(poll, POLL_MS);
}

quietly(start);
