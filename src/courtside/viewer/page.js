// Routing by the address (#/batch/trajectory/turn), polling, and keyboard shortcuts.

import * as conversation from "./conversation.js";
import { byId, describeRow, notify } from "./dom.js";
import { setRun } from "./drafts.js";
import { filterRows, filters, showBatches, showHintsFile, showRows } from "./sidebar.js";
import { Unreachable, apiPath, get } from "./api.js";

const POLL_MS = 2000;
const SEARCH_MS = 200;

const route = { key: null, id: null, turn: null };
let run = null;
let rows = [];
let matches = null;
let loaded = null; // the trajectory on the page: "batch/id"

// ── routing ──────────────────────────────────────────────────────────────────────────────────────

function parseHash() {
  const [key, id, turn] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  return { key: key || null, id: id || null, turn: turn ? Number(turn) : null };
}

function formatHash({ key, id, turn }) {
  return `#/${[key, id, turn].filter((part) => part !== null).map(encodeURIComponent).join("/")}`;
}

function replace(change) {
  Object.assign(route, change);
  history.replaceState(null, "", formatHash(route));
}

const go = (change) => { location.hash = formatHash({ key: route.key, id: null, turn: null, ...change }); };

async function navigate() {
  const requested = parseHash();
  if (!run.batches.length) return showNoBatches();
  if (requested.key === null) warnAboutUnreadable();
  const key = requested.key ?? run.start ?? run.batches.at(-1).key;
  const batch = run.batches.find((one) => one.key === key);
  if (!batch) {
    const start = run.start ?? run.batches.at(-1).key;
    notify(`${/^\d+$/.test(key) ? `Step ${key}` : key} is not stored; showing ${titleOf(start)}.`);
    history.replaceState(null, "", formatHash({ key: start, id: null, turn: null }));
    return navigate();
  }
  const isOther = key !== route.key;
  Object.assign(route, requested, { key });
  if (batch.problem) return showProblem(batch);
  if (isOther) await loadRows();
  drawList();
  await showTrajectory();
}

const titleOf = (key) => run.batches.find((batch) => batch.key === key)?.title ?? key;

// The page opens on a batch that can be read; that newer ones cannot is said.
function warnAboutUnreadable() {
  const index = run.batches.findIndex(({ key }) => key === run.start);
  const broken = run.batches.filter(({ held_out, problem }, i) => problem && !held_out && i > index);
  if (broken.length && run.start !== null) {
    notify(`${broken.map(({ title }) => title).join(", ")} cannot be read; showing ${titleOf(run.start)}.`);
  }
}

function showProblem(batch) {
  rows = [];
  loaded = null;
  drawList();
  document.body.classList.add("reading");
  conversation.showMessage([`${batch.title} cannot be read.`, batch.problem]);
}

function showNoBatches() {
  showBatches([], null);
  byId("count").textContent = "";
  conversation.showMessage([
    "No trajectories are stored in this run yet.",
    "run.trajectories_every sets which steps are stored. The page updates while the run continues.",
  ]);
}

// ── the list ─────────────────────────────────────────────────────────────────────────────────────

async function loadRows() {
  const key = route.key;
  const newRows = (await get(`/api/batches/${encodeURIComponent(key)}`)).trajectories;
  if (key !== route.key) return;
  rows = newRows;
  await search();
}

async function search() {
  const query = byId("search").value.trim();
  const key = route.key;
  const path = `/api/batches/${encodeURIComponent(key)}/search?query=${encodeURIComponent(query)}`;
  const ids = query ? (await get(path)).ids : null;
  if (key === route.key && query === byId("search").value.trim()) matches = ids && new Set(ids);
}

const visible = () => filterRows(rows, matches);

function drawList() {
  showBatches(run.batches, route.key);
  showRows(rows, visible(), route.id, route.key);
}

// ── the conversation ─────────────────────────────────────────────────────────────────────────────

const isWide = () => matchMedia("(min-width: 821px)").matches;

async function showTrajectory() {
  if (route.id === null && isWide() && visible().length) {
    const wrong = visible().find((row) => row.errors > 0 || row.grade?.passed === false);
    replace({ id: (wrong ?? visible()[0]).id, turn: null });
    drawList();
  }
  document.body.classList.toggle("reading", route.id !== null);
  if (route.id === null) {
    loaded = null;
    return conversation.showMessage(["Choose a trajectory."]);
  }
  const name = `${route.key}/${route.id}`;
  if (loaded !== name) {
    const trajectory = await get(apiPath(route.key, route.id)).catch((error) => error);
    if (name !== `${route.key}/${route.id}`) return;
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
  if (!before.batches.length && run.batches.length) return navigate();
  const state = ({ hints_file, batches }) => JSON.stringify([hints_file, batches]);
  if (state(run) === state(before) || route.key === null) return;
  const problem = ({ batches }) => batches.find(({ key }) => key === route.key)?.problem;
  if (problem(run)) return showProblem(run.batches.find(({ key }) => key === route.key));
  await loadRows();
  drawList();
  if (problem(before)) return showTrajectory();
  if (loaded !== `${route.key}/${route.id}`) return;
  const trajectory = await get(apiPath(route.key, route.id));
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
  byId("step").addEventListener("change", (event) => go({ key: event.target.value }));
  const stepBy = (direction) => () => {
    const index = run.batches.findIndex(({ key }) => key === route.key);
    go({ key: run.batches[index + direction].key });
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
