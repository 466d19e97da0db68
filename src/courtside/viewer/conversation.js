// One trajectory, turn by turn, with the hints above its turns.

import { OwnHint } from "./hint.js";
import { badge, byId, counted, foldable, gradeBadge, make, nats, spoken, underlined } from "./parts.js";

const FOLD_SYSTEM = 300;
const FOLD_MESSAGE = 1500;
const FOLD_TURN = 12000;

let shown = null; // { trajectory, hints: Map of turn → OwnHint, turns: Map of turn → element }

export function showNothing(words) {
  shown = null;
  byId("conversation").replaceChildren(make("div", { class: "nothing" }, ...words.map((one) => make("p", {}, one))));
}

// `actions`: previous and next trajectory, what was written, the list to go back to.
export function show(trajectory, own, row, actions) {
  const hints = new Map();
  const turns = new Map();
  shown = { trajectory, hints, turns, own };
  const parts = trajectory.turns.map((turn) => {
    if (turn.role === "assistant") {
      hints.set(turn.number, new OwnHint(trajectory, turn, own, (state) => { budget(state ?? shown?.own); actions.wrote(state); }));
    }
    const element = turnElement(trajectory, turn, hints.get(turn.number));
    turns.set(turn.number, element);
    return element;
  });
  const context = trajectory.context
    ? make("details", { class: "context" }, make("summary", {}, "what only the teacher saw"), make("pre", {}, trajectory.context))
    : null;
  byId("conversation").replaceChildren(head(trajectory, row, actions), make("div", { class: "turns" }, context, ...parts));
  budget(own);
  measured.disconnect();
  measured.observe(byId("conversation").querySelector(".head"));
}

// How much of the page its sticky head covers, so that turns are scrolled to below it.
const measured = new ResizeObserver(([{ target }]) => {
  const style = document.documentElement.style;
  style.setProperty("--head", `${target.offsetHeight}px`);
  style.setProperty("--go", `${target.offsetHeight - target.querySelector(".go").offsetTop + 8}px`);
});

// The person's hints as the file has them now; editors that are open stay as they are.
export function update(trajectory, own) {
  if (shown?.trajectory.id !== trajectory.id || shown.trajectory.step !== trajectory.step) return;
  shown.own = own;
  for (const turn of trajectory.turns) shown.hints.get(turn.number)?.update(turn.mine);
  budget(own);
}

export function mark(number, { scroll = true } = {}) {
  for (const [turn, element] of shown?.turns ?? []) element.classList.toggle("current", turn === number);
  const element = shown?.turns.get(number);
  if (element && scroll) element.scrollIntoView({ block: "start" });
  return Boolean(element);
}

// The next turn with an error after this one (or before it, with direction −1); null: no other.
export function errorFrom(number, direction) {
  const wrong = (shown?.trajectory.turns ?? []).filter((turn) => turn.events.length).map((turn) => turn.number);
  if (direction > 0) return wrong.find((one) => number === null || one > number) ?? null;
  return wrong.reverse().find((one) => number !== null && one < number) ?? null;
}

// Above the current turn, or else above the first that went wrong.
export function writeAt(number) {
  const at = shown?.hints.has(number) ? number : errorFrom(null, 1) ?? shown?.hints.keys().next().value;
  const hint = shown?.hints.get(at);
  if (!hint) return null;
  if (!hint.area) hint.open(true);
  hint.area.focus();
  return at;
}

function budget(own) {
  if (!shown) return;
  const mine = [...shown.hints.values()].filter((hint) => hint.mine).length;
  const told = byId("budget");
  told.hidden = mine <= own.max_hints;
  told.textContent = `${counted(mine, "hint")} here; a reader takes the first ${own.max_hints} of a trajectory (reader.max_hints).`;
}

function head(trajectory, row, actions) {
  const errors = trajectory.turns.filter((turn) => turn.events.length).length;
  const button = (words, title, run, disabled) =>
    make("button", { type: "button", title, onclick: run, disabled: Boolean(disabled) }, words);
  const key = (name, first) => make("kbd", { class: first ? "first" : null }, name);
  const step = (direction) => () => actions.toError(direction);
  return make("header", { class: "head" },
    make("a", { class: "back", href: `#/${trajectory.step}` }, "‹ all trajectories"),
    make("h2", {}, trajectory.asked),
    make("p", { class: "about" }, gradeBadge(trajectory.grade),
      make("span", {}, [`step ${trajectory.step}`, trajectory.id, row].filter(Boolean).join(" · "))),
    trajectory.grade?.feedback ? make("p", { class: "caption" }, trajectory.grade.feedback) : null,
    trajectory.source === "dataset"
      ? make("p", { class: "caption" }, "A recorded conversation: a hint written here holds in every step it comes up in.")
      : null,
    make("p", { class: "caption problem", id: "budget", hidden: true }),
    make("div", { class: "go" },
      make("span", {}, button("‹", "previous trajectory (k)", actions.previous, actions.isFirst), "trajectory",
        button("›", "next trajectory (j)", actions.next, actions.isLast)),
      make("span", {}, button("‹", "previous turn with an error (p)", step(-1), !errors), counted(errors, "error"),
        button("›", "next turn with an error (n)", step(1), !errors)),
      make("small", { class: "keys" }, key("j", true), key("k"), " trajectory", key("n", true), key("p"), " error",
        key("h", true), " hint", key("/", true), " search")));
}

function turnElement(trajectory, turn, own) {
  const number = make("a", { class: "turn-number", href: `#/${trajectory.step}/${encodeURIComponent(trajectory.id)}/${turn.number}`,
    title: `turn ${turn.number}: the number that the hints file uses` }, String(turn.number));
  const body = make("div", { class: "body" });
  if (own) {
    body.append(...turn.hints.map(hintLine), own.place, assistantLine(trajectory, turn));
  } else if (turn.messages.length) {
    body.append(...turn.messages.map((one) => given(one.role, one.content, one.role === "system" ? FOLD_SYSTEM : FOLD_MESSAGE)));
  } else {
    body.append(given(turn.role, turn.text, FOLD_MESSAGE));
  }
  return make("article", { class: `turn ${turn.role}${turn.events.length ? " wrong" : ""}`, "data-turn": turn.number,
    "aria-label": `turn ${turn.number}, ${turn.role}` }, number, body);
}

function given(role, text, limit) {
  return said(role, `given ${role}`, foldable(text, limit));
}

function assistantLine(trajectory, turn) {
  const spans = turn.hints.map((hint) => hint.bad_span);
  const text = turn.text.length > FOLD_TURN
    ? foldable(turn.text, FOLD_TURN)
    : make("div", { class: "text" }, ...(turn.text ? underlined(turn.text, spans) : [make("i", {}, "nothing")]));
  const facts = make("div", { class: "facts-line" },
    ...turn.events.map((event) => badge("failed", spoken(event.kind))),
    ...turn.events.filter((event) => event.message).map((event) => make("span", { class: "failed" }, event.message)),
    turn.gap === null ? null : make("small", { class: "gap", title: "teacher’s minus student’s log-probability, mean over the tokens both spoke of" },
      `mean gap ${nats(turn.gap)}`));
  return said(trajectory.source === "dataset" ? "assistant" : trajectory.source, "assistant",
    facts.childNodes.length ? facts : null, text);
}

function hintLine(hint) {
  const facts = [hint.source];
  if (hint.shift !== null) facts.push(`shift ${nats(hint.shift)}`);
  if (hint.bad_span_shift !== null) facts.push(`of the underlined words ${nats(hint.bad_span_shift)}`);
  if (hint.pass_rate !== null) facts.push(`${Math.round(100 * hint.pass_rate)}% of replies under it pass`);
  if (hint.confidence !== null) facts.push(`confidence ${hint.confidence}`);
  facts.push(hint.drop_reason ? `dropped: ${spoken(hint.drop_reason)}${hint.why ? ` (${hint.why})` : ""}` : "kept");
  return said("hint", hint.drop_reason ? "hint dropped" : "hint",
    make("div", { class: "facts-line" }, make("small", { title: hint.reason || null }, facts.join(" · "))),
    make("div", { class: "text" }, hint.text));
}

function said(name, kind, ...parts) {
  return make("div", { class: `entry ${kind}` }, make("b", {}, name), make("div", {}, ...parts));
}
