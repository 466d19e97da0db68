// Routing by the address (#/step/trajectory/turn), polling, and keyboard shortcuts.

import * as conversation from "./conversation.js";
import { byId, describeRow, notify } from "./dom.js";
import { setRun } from "./drafts.js";
import { filterRows, filters, showHintsFile, showRows, showSteps } from "./sidebar.js";
import { Unreachable, apiPath, get } from "./api.js";

const POLL_MS = 2000;
const SEARCH_MS = 200;

const route = { step: null, id: null, turn: null };
let run = null;
let rows = [];
let matches = null;
let loaded = null; // the trajectory on the page: "step/id"

// ── routing ──────────────────────────────────────────────────────────────────────────────────────

function parseHash() {
  const [step, id, turn] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  return { step: step ? Number(step) : null, id: id || null, turn: turn ? Number(turn) : null };
}

function formatHash({ step, id, turn }) {
  return `#/${[step, id, turn].filter((part) => part !== null).map(encodeURIComponent).join("/")}`;
}

function replace(change) {
  Object.assign(route, change);
  history.replaceState(null, "", formatHash(route));
}

const go = (change) => { location.hash = formatHash({ step: route.step, id: null, turn: null, ...change }); };

async function navigate() {
  const requested = parseHash();
  const numbers = run.steps.map(({ step }) => step);
  if (!numbers.length) return showNoSteps();
  const step = requested.step ?? numbers.at(-1);
  if (!numbers.includes(step)) {
    notify(`Step ${step} is not stored; showing step ${numbers.at(-1)}.`);
    history.replaceState(null, "", formatHash({ step: numbers.at(-1), id: null, turn: null }));
    return navigate();
  }
  const isOtherStep = step !== route.step;
  Object.assign(route, requested, { step });
  if (isOtherStep) await loadRows();
  drawList();
  await showTrajectory();
}

function showNoSteps() {
  showSteps([], null);
  byId("count").textContent = "";
  conversation.showMessage([
    "No trajectories are stored in this run yet.",
    "run.trajectories_every sets which steps are stored. The page updates while the run continues.",
  ]);
}

// ── the list ─────────────────────────────────────────────────────────────────────────────────────

async function loadRows() {
  const step = route.step;
  const newRows = (await get(`/api/steps/${step}`)).trajectories;
  if (step !== route.step) return;
  rows = newRows;
  await search();
}

async function search() {
  const query = byId("search").value.trim();
  const step = route.step;
  const ids = query ? (await get(`/api/steps/${step}/search?query=${encodeURIComponent(query)}`)).ids : null;
  if (step === route.step && query === byId("search").value.trim()) matches = ids && new Set(ids);
}

const visible = () => filterRows(rows, matches);

function drawList() {
  showSteps(run.steps, route.step);
  showRows(rows, visible(), route.id, route.step);
}

// ── the conversation ─────────────────────────────────────────────────────────────────────────────

const isWide = () => matchMedia("(min-width: 821px)").matches;

async function showTrajectory() {
  if (route.id === null && isWide() && visible().length) {
    replace({ id: visible()[0].id, turn: null });
    drawList();
  }
  document.body.classList.toggle("reading", route.id !== null);
  if (route.id === null) {
    loaded = null;
    return conversation.showMessage(["Choose a trajectory."]);
  }
  const name = `${route.step}/${route.id}`;
  if (loaded !== name) {
    const trajectory = await get(apiPath(route.step, route.id)).catch((error) => error);
    if (name !== `${route.step}/${route.id}`) return;
    if (trajectory instanceof Error) {
      loaded = null;
      conversation.showMessage([trajectory.message]);
      return;
    }
    loaded = name;
    drawTrajectory(trajectory);
    byId("conversation").scrollTop = 0;
    window.scrollTo(0, 0);
    document.querySelector('#rows [aria-current="true"]')?.scrollIntoView({ block: "nearest" });
  }
  conversation.select(route.turn);
}

function drawTrajectory(trajectory) {
  const row = rows.find(({ id }) => id === trajectory.id);
  const index = visible().findIndex(({ id }) => id === trajectory.id);
  conversation.show(trajectory, row ? describeRow(row) : "", {
    previous: () => goToNeighbor(-1),
    next: () => goToNeighbor(1),
    isFirst: index <= 0,
    isLast: index < 0 || index + 1 >= visible().length,
    goToError,
    onWrite,
  });
}

function goToNeighbor(direction) {
  const index = visible().findIndex(({ id }) => id === route.id);
  const next = visible()[index < 0 ? 0 : index + direction];
  if (next) go({ id: next.id });
  else notify(direction > 0 ? "This is the last trajectory of the list." : "This is the first trajectory of the list.");
}

function goToError(direction) {
  const turn = conversation.findError(route.turn, direction);
  if (turn === null) return notify(direction > 0 ? "No error after this turn." : "No error before this turn.");
  replace({ turn });
  conversation.select(turn);
}

// After a hint was saved or removed; null: that failed.
function onWrite(file) {
  if (file) {
    run.hints_file = file;
    showHintsFile(file);
  }
  return reportErrors(refresh);
}

// ── polling ──────────────────────────────────────────────────────────────────────────────────────

async function refresh() {
  const before = run;
  run = await get("/api/run");
  showHintsFile(run.hints_file);
  if (!before.steps.length && run.steps.length) return navigate();
  const state = ({ hints_file, steps }) => JSON.stringify([hints_file, steps]);
  if (state(run) === state(before) || route.step === null) return;
  await loadRows();
  drawList();
  if (loaded !== `${route.step}/${route.id}`) return;
  const trajectory = await get(apiPath(route.step, route.id));
  conversation.update(trajectory);
}

async function poll() {
  if (!document.hidden) await reportErrors(refresh);
  setTimeout(poll, POLL_MS);
}

// An unreachable server has its own message, and polling goes on.
async function reportErrors(work) {
  try {
    await work();
  } catch (error) {
    if (!(error instanceof Unreachable)) notify(error.message);
  }
}

// ── buttons and keys ─────────────────────────────────────────────────────────────────────────────

const KEYS = {
  j: () => goToNeighbor(1),
  k: () => goToNeighbor(-1),
  n: () => goToError(1),
  p: () => goToError(-1),
  h: () => {
    const turn = conversation.openEditor(route.turn);
    if (turn === null) return;
    replace({ turn });
    conversation.select(turn, { scroll: false });
  },
  "/": () => byId("search").focus(),
};

function listen() {
  let searchTimer = 0;
  byId("search").addEventListener("input", () => {
    clearTimeout(searchTimer);
    searchTimer = setTimeout(() => reportErrors(async () => { await search(); drawList(); }), SEARCH_MS);
  });
  byId("search").addEventListener("keydown", (event) => {
    if (event.key === "Escape") event.target.blur();
  });
  for (const button of document.querySelectorAll("[data-filter]")) {
    button.addEventListener("click", () => {
      filters[button.dataset.filter] = !filters[button.dataset.filter];
      drawList();
    });
  }
  byId("step").addEventListener("change", (event) => go({ step: Number(event.target.value) }));
  const stepBy = (direction) => () => {
    const index = run.steps.findIndex(({ step }) => step === route.step);
    go({ step: run.steps[index + direction].step });
  };
  byId("earlier").addEventListener("click", stepBy(-1));
  byId("later").addEventListener("click", stepBy(1));
  byId("copy").addEventListener("click", copy);
  window.addEventListener("hashchange", () => reportErrors(navigate));
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
    notify("Copied.");
  } catch {
    getSelection().selectAllChildren(byId("recipe"));
    notify("Selected; copy it with the keyboard.");
  }
}

async function start() {
  run = await get("/api/run");
  setRun(run.path);
  document.title = `${run.name} · courtside`;
  byId("name").textContent = run.name;
  byId("summary").textContent = run.summary;
  showHintsFile(run.hints_file);
  listen();
  await reportErrors(navigate);
  setTimeout(poll, POLL_MS);
}

reportErrors(start);
