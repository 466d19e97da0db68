// Pieces of the page. Texts of models, tasks and tools only ever become text nodes.

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

export const byId = (id) => document.getElementById(id);

export const counted = (number, what) => `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;

export const spoken = (name) => name.replaceAll("_", " ");

export function nats(value) {
  const sign = value < 0 ? "−" : "+";
  return `${sign}${Math.abs(value).toFixed(2)} nats`;
}

export function badge(kind, text, title) {
  return make("span", { class: `badge ${kind}`, title: title || null }, text);
}

export function gradeBadge(grade) {
  if (!grade) return null;
  const word = grade.passed ? "passed" : "failed";
  return badge(word, word, grade.feedback || `score ${grade.score}`);
}

const CUT = { length: " (cut off)", time: " (out of time)", turns: " (out of turns)" };

// "5 turns · 2 errors · 81 tokens"; an error is a turn with one.
export function facts(one) {
  const parts = [counted(one.turns, "turn")];
  if (one.errors) parts.push(counted(one.errors, "error"));
  parts.push(counted(one.tokens, "token") + (CUT[one.stop] || ""));
  return parts.join(" · ");
}

// A text in which some spans are underlined, each where it first stands.
export function underlined(text, spans) {
  const places = spans
    .filter((span) => span && text.includes(span))
    .map((span) => [text.indexOf(span), text.indexOf(span) + span.length])
    .sort((a, b) => a[0] - b[0]);
  const parts = [];
  let at = 0;
  for (const [start, end] of places) {
    if (start < at) continue;
    parts.push(text.slice(at, start), make("span", { class: "bad" }, text.slice(start, end)));
    at = end;
  }
  parts.push(text.slice(at));
  return parts;
}

// Long texts show their beginning until somebody wants the rest.
export function foldable(text, limit) {
  const box = make("div", { class: "text" });
  if (text.length <= limit * 1.3) {
    box.append(text);
    return box;
  }
  const shown = document.createTextNode("");
  const button = make("button", { type: "button", class: "fold" });
  const set = (open) => {
    shown.data = open ? text : `${text.slice(0, limit).trimEnd()} …`;
    button.textContent = open ? "fold" : `show all ${counted(text.length, "character")}`;
    button.setAttribute("aria-expanded", String(open));
  };
  button.addEventListener("click", () => set(button.getAttribute("aria-expanded") !== "true"));
  set(false);
  box.append(shown, make("br"), button);
  return box;
}

let fading = 0;

// A short word on what has just happened, with one thing that can be done about it.
export function note(text, action) {
  const box = byId("note");
  clearTimeout(fading);
  box.replaceChildren(text);
  if (action) {
    const done = () => { box.hidden = true; action.run(); };
    box.append(make("button", { type: "button", onclick: done }, action.name));
  }
  box.hidden = false;
  fading = setTimeout(() => { box.hidden = true; }, action ? 9000 : 4000);
}
