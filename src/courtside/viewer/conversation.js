// One trajectory turn by turn, with the hints before its turns.

import { HintEditor } from "./hint_editor.js";
import { correctionBadges, critiqueEntry, describeScores, forkMark, relatedLinks } from "./corrections.js";
import { badge, byId, collapsible, formatNats, gradeBadge, make, pluralize, readableName, underlineSpans } from "./dom.js";

const MAX_SYSTEM_CHARS = 300;
const MAX_MESSAGE_CHARS = 1500;
const MAX_TURN_CHARS = 12000;

let current = null; // { trajectory, editors: Map of turn → HintEditor, turns: Map of turn → element, file }

export function showMessage(lines) {
  current = null;
  byId("conversation").replaceChildren(make("div", { class: "empty-state" }, ...lines.map((text) => make("p", {}, text))));
}

// `description` is of the list's row; `actions` are callbacks of the head and the editors.
export function show(trajectory, description, actions) {
  const editors = new Map();
  const turns = new Map();
  const file = trajectory.hints_file;
  current = { trajectory, editors, turns, file };
  const parts = trajectory.turns.map((turn) => {
    if (turn.role === "assistant" && !trajectory.held_out) {
      editors.set(turn.number, new HintEditor(trajectory, turn, file, (state) => {
        warnAboutMaxHints(state ?? current?.file);
        actions.onWrite(state);
      }));
    }
    const element = turnElement(trajectory, turn, editors.get(turn.number));
    turns.set(turn.number, element);
    return element;
  });
  const context = trajectory.context
    ? make("details", { class: "context" }, make("summary", {}, "teacher-only context"), make("pre", {}, trajectory.context))
    : null;
  byId("conversation").replaceChildren(head(trajectory, description, actions), make("div", { class: "turns" }, context, critiqueEntry(trajectory), ...parts));
  warnAboutMaxHints(file);
  headObserver.disconnect();
  headObserver.observe(byId("conversation").querySelector(".head"));
}

// Height of the sticky head, so that turns scroll to below it.
const headObserver = new ResizeObserver(([{ target }]) => {
  const style = document.documentElement.style;
  style.setProperty("--head", `${target.offsetHeight}px`);
  style.setProperty("--go", `${target.offsetHeight - target.querySelector(".go").offsetTop + 8}px`);
});

// The user's hints as the file has them now; open editors keep their text.
export function update(trajectory) {
  if (current?.trajectory.id !== trajectory.id || current.trajectory.key !== trajectory.key) return;
  current.file = trajectory.hints_file;
  for (const turn of trajectory.turns) current.editors.get(turn.number)?.update(turn.user_hint);
  warnAboutMaxHints(current.file);
}

export function select(number, { scroll = true } = {}) {
  for (const [turn, element] of current?.turns ?? []) element.classList.toggle("current", turn === number);
  const element = current?.turns.get(number);
  if (element && scroll) element.scrollIntoView({ block: "start" });
  return Boolean(element);
}

// The next turn with an error after this one (before it with direction −1); null: there is none.
export function findError(number, direction) {
  const errors = (current?.trajectory.turns ?? []).filter((turn) => turn.events.length).map((turn) => turn.number);
  if (direction > 0) return errors.find((turn) => number === null || turn > number) ?? null;
  return errors.reverse().find((turn) => number !== null && turn < number) ?? null;
}

// Open the editor of the selected turn, or of the first turn with an error.
export function openEditor(number) {
  const turn = current?.editors.has(number) ? number : findError(null, 1) ?? current?.editors.keys().next().value;
  const editor = current?.editors.get(turn);
  if (!editor) return null;
  if (!editor.area) editor.open(true);
  editor.area.focus();
  return turn;
}

function warnAboutMaxHints(file) {
  if (!current) return;
  const count = [...current.editors.values()].filter((editor) => editor.hint).length;
  const warning = byId("max-hints");
  warning.hidden = count <= file.max_hints;
  warning.textContent = `${pluralize(count, "hint")}; the reader uses the first ${file.max_hints} of a trajectory (reader.max_hints).`;
}

function head(trajectory, description, actions) {
  const errors = trajectory.turns.filter((turn) => turn.events.length).length;
  const button = (label, title, run, disabled) =>
    make("button", { type: "button", title, onclick: run, disabled: Boolean(disabled) }, label);
  const key = (name, first) => make("kbd", { class: first ? "first" : null }, name);
  const step = (direction) => () => actions.goToError(direction);
  return make("header", { class: "head" },
    make("a", { class: "back", href: `#/${encodeURIComponent(trajectory.key)}` }, "‹ all trajectories"),
    make("h2", {}, trajectory.prompt),
    make("p", { class: "about" }, gradeBadge(trajectory.grade), ...correctionBadges(trajectory),
      make("span", {}, [trajectory.batch, trajectory.id, description, describeScores(trajectory)].filter(Boolean).join(" · "))),
    relatedLinks(trajectory),
    trajectory.grade?.feedback ? make("p", { class: "caption" }, trajectory.grade.feedback) : null,
    trajectory.held_out
      ? make("p", { class: "caption" }, "A held-out answer. Hints are for training steps: one here would train on what is evaluated.")
      : null,
    trajectory.source === "dataset"
      ? make("p", { class: "caption" }, "A recorded conversation: its hints apply in every step.")
      : null,
    make("p", { class: "caption problem", id: "max-hints", hidden: true }),
    make("div", { class: "go" },
      make("span", {}, button("‹", "previous trajectory (k)", actions.previous, actions.isFirst), "trajectory",
        button("›", "next trajectory (j)", actions.next, actions.isLast)),
      make("span", {}, button("‹", "previous turn with an error (p)", step(-1), !errors), pluralize(errors, "error"),
        button("›", "next turn with an error (n)", step(1), !errors)),
      make("small", { class: "keys" }, key("j", true), key("k"), " trajectory", key("n", true), key("p"), " error",
        key("h", true), " hint", key("/", true), " search")));
}

function turnElement(trajectory, turn, editor) {
  const number = make("a", { class: "turn-number", href: `#/${encodeURIComponent(trajectory.key)}/${encodeURIComponent(trajectory.id)}/${turn.number}`,
    title: `turn ${turn.number}: the index in the hints file` }, String(turn.number));
  const body = make("div", { class: "body" });
  if (turn.role === "assistant") {
    body.append(...[forkMark(trajectory, turn)].filter(Boolean), ...turn.hints.map(hintEntry), ...(editor ? [editor.element] : []), assistantEntry(trajectory, turn));
  } else if (turn.messages.length) {
    body.append(...turn.messages.map(({ role, content }) => contextEntry(role, content, role === "system" ? MAX_SYSTEM_CHARS : MAX_MESSAGE_CHARS)));
  } else {
    body.append(contextEntry(turn.role, turn.text, MAX_MESSAGE_CHARS));
  }
  return make("article", { class: `turn ${turn.role}${turn.events.length ? " wrong" : ""}`, "data-turn": turn.number,
    "aria-label": `turn ${turn.number}, ${turn.role}` }, number, body);
}

function contextEntry(role, text, limit) {
  return entry(role, `given ${role}`, collapsible(text, limit));
}

function assistantEntry(trajectory, turn) {
  const spans = turn.hints.map((hint) => hint.bad_span);
  const text = turn.text.length > MAX_TURN_CHARS
    ? collapsible(turn.text, MAX_TURN_CHARS)
    : make("div", { class: "text" }, ...(turn.text ? underlineSpans(turn.text, spans) : [make("i", {}, "empty")]));
  const facts = make("div", { class: "facts-line" },
    ...turn.events.map((event) => badge("failed", readableName(event.kind))),
    ...turn.events.filter((event) => event.message).map((event) => make("span", { class: "failed" }, event.message)),
    turn.gap === null ? null : make("small", { class: "gap", title: "log-probability of the teacher minus the student’s, mean over the tokens that both scored" },
      `mean gap ${formatNats(turn.gap)}`),
    turn.versions.length ? make("small", { class: "versions", title: "optimizer steps of the weights that sampled these tokens" }, describeVersions(turn.versions)) : null);
  return entry(turn.author === "dataset" ? "assistant" : turn.author, "assistant",
    facts.childNodes.length ? facts : null, text);
}

// "weights of step 3 (17 tokens), step 4 (5)"
function describeVersions(spans) {
  return `weights of ${spans.map((span, i) => `step ${span.version} (${span.end - span.start}${i ? "" : " tokens"})`).join(", ")}`;
}

function hintEntry(hint) {
  const facts = [hint.source];
  if (hint.shift !== null) facts.push(`shift ${formatNats(hint.shift)}`);
  if (hint.bad_span_shift !== null) facts.push(`shift of the underlined span ${formatNats(hint.bad_span_shift)}`);
  if (hint.pass_rate !== null) facts.push(`${Math.round(100 * hint.pass_rate)}% of replies with the hint pass`);
  if (hint.confidence !== null) facts.push(`confidence ${hint.confidence}`);
  facts.push(hint.drop_reason ? `dropped: ${readableName(hint.drop_reason)}${hint.drop_explanation ? ` (${hint.drop_explanation})` : ""}` : "trained on");
  return entry("hint", hint.drop_reason ? "hint dropped" : "hint",
    make("div", { class: "facts-line" }, make("small", { title: hint.reason || null }, facts.join(" · "))),
    make("div", { class: "text" }, hint.text));
}

function entry(name, kind, ...parts) {
  return make("div", { class: `entry ${kind}` }, make("b", {}, name), make("div", {}, ...parts));
}
