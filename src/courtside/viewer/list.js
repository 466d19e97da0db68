// The steps of a run, and the trajectories of one of them.

import { drafted } from "./kept.js";
import { byId, counted, facts, gradeBadge, make } from "./parts.js";

export const filters = { errors: false, hints: false, mine: false };

// `found`: ids that a search has found; null: nobody searches.
export function chosen(rows, found) {
  return rows.filter((row) => (found === null || found.has(row.id))
    && Object.entries(filters).every(([name, on]) => !on || row[name] > 0));
}

export function showSteps(steps, current) {
  const select = byId("step");
  const words = steps.map((one) => stepWords(one));
  const same = select.options.length === steps.length
    && steps.every((one, i) => select.options[i].value === String(one.step) && select.options[i].text === words[i]);
  if (!same) {
    select.replaceChildren(...steps.map((one, i) => make("option", { value: one.step }, words[i])));
  }
  if (current !== null) select.value = String(current);
  const at = steps.findIndex((one) => one.step === current);
  byId("earlier").disabled = at <= 0;
  byId("later").disabled = at < 0 || at + 1 >= steps.length;
  select.disabled = steps.length === 0;
}

function stepWords(one) {
  if (one.problem) return `step ${one.step} · cannot be read`;
  const parts = [`step ${one.step}`];
  if (one.mine) parts.push(`${one.mine} mine`);
  parts.push(one.errors ? `${one.errors} of ${one.trajectories} with errors` : `${one.trajectories} without errors`);
  return parts.join(" · ");
}

export function showRows(rows, visible, current, step) {
  for (const button of document.querySelectorAll("[data-filter]")) {
    button.setAttribute("aria-pressed", String(filters[button.dataset.filter]));
  }
  byId("count").textContent = visible.length === rows.length
    ? counted(rows.length, "trajector").replace(/trajectors?$/, rows.length === 1 ? "trajectory" : "trajectories")
    : `${visible.length} of ${rows.length} trajectories`;
  const drafts = drafted();
  const list = byId("rows");
  const at = list.scrollTop;
  const focused = list.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  list.replaceChildren(...visible.map((row) => item(row, row.id === current, step, drafts.has(row.hinted_id))));
  if (!visible.length) list.append(make("li", { class: "empty" }, rows.length ? "None of them. Take a filter away." : "This step has none."));
  list.scrollTop = at;
  if (focused) [...list.querySelectorAll("a")].find((one) => one.getAttribute("href") === focused)?.focus({ preventScroll: true });
}

function item(row, isCurrent, step, hasDraft) {
  return make("li", {},
    make("a", { href: `#/${step}/${encodeURIComponent(row.id)}`, title: row.id, "aria-current": isCurrent ? "true" : null },
      make("span", { class: "asked" }, row.asked),
      make("span", { class: "about" }, gradeBadge(row.grade), make("span", {}, facts(row)),
        row.hints ? make("span", { class: "chip" }, counted(row.hints, "hint")) : null,
        row.mine ? make("span", { class: "chip mine" }, `${row.mine} mine`) : null,
        hasDraft ? make("span", { class: "chip draft" }, "draft") : null)));
}

export function showOwn(own) {
  byId("own").replaceChildren(make("b", {}, counted(own.count, "hint")), " in ", make("code", {}, own.path));
  byId("problem").hidden = own.problem === null;
  byId("problem").textContent = own.problem === null ? "" : `Nothing can be written: ${own.problem}`;
  byId("recipe").textContent = own.recipe.trim();
}
