// The batches of a run (training steps, held-out evaluations), and the trajectories of one.

import { draftedIds } from "./drafts.js";
import { correctionBadges, describeScores } from "./corrections.js";
import { byId, describeRow, gradeBadge, make, pluralize } from "./dom.js";

export const filters = { errors: false, hints: false, user_hints: false };

// `matches`: ids that match the search; null: there is no search.
export function filterRows(rows, matches) {
  return rows.filter((row) => (matches === null || matches.has(row.id))
    && Object.entries(filters).every(([name, on]) => !on || row[name] > 0));
}

export function showBatches(batches, current) {
  const select = byId("step");
  const labels = batches.map((batch) => batchLabel(batch));
  const same = select.options.length === batches.length
    && batches.every(({ key }, i) => select.options[i].value === key && select.options[i].text === labels[i]);
  if (!same) {
    const options = batches.map(({ key, held_out }, i) => [held_out, make("option", { value: key }, labels[i])]);
    const group = (label, isHeldOut) => {
      const members = options.filter(([held_out]) => held_out === isHeldOut).map(([, option]) => option);
      return members.length ? [make("optgroup", { label }, ...members)] : [];
    };
    select.replaceChildren(...group("training steps", false), ...group("held-out evaluations", true));
  }
  if (current !== null) select.value = current;
  const index = batches.findIndex(({ key }) => key === current);
  byId("earlier").disabled = index <= 0;
  byId("later").disabled = index < 0 || index + 1 >= batches.length;
  select.disabled = batches.length === 0;
}

function batchLabel({ title, problem, user_hints, errors, failed, trajectories }) {
  if (problem) return `${title} · cannot be read`;
  const parts = [title];
  if (user_hints) parts.push(`${user_hints} with my hints`);
  if (errors) parts.push(`${errors} of ${trajectories} with errors`);
  else parts.push(failed ? `${failed} of ${trajectories} failed` : `${trajectories} without errors`);
  return parts.join(" · ");
}

export function showRows(rows, visible, current, key) {
  for (const button of document.querySelectorAll("[data-filter]")) {
    button.setAttribute("aria-pressed", String(filters[button.dataset.filter]));
  }
  byId("count").textContent = visible.length === rows.length
    ? `${rows.length.toLocaleString("en")} ${rows.length === 1 ? "trajectory" : "trajectories"}`
    : `${visible.length} of ${rows.length} trajectories`;
  const drafts = draftedIds();
  const list = byId("rows");
  const scrollTop = list.scrollTop;
  const focused = list.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  list.replaceChildren(...visible.map((row) => item(row, row.id === current, key, drafts.has(row.hints_file_id))));
  if (!visible.length) list.append(make("li", { class: "empty" }, rows.length ? "No matches. Remove a filter." : "There are no trajectories here."));
  list.scrollTop = scrollTop;
  if (focused) [...list.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus({ preventScroll: true });
}

function item(row, isCurrent, key, hasDraft) {
  return make("li", {},
    make("a", { href: `#/${encodeURIComponent(key)}/${encodeURIComponent(row.id)}`, title: row.id, "aria-current": isCurrent ? "true" : null },
      make("span", { class: "prompt-line" }, row.prompt),
      make("span", { class: "about" }, gradeBadge(row.grade), make("span", {}, [describeRow(row), describeScores(row)].filter(Boolean).join(" · ")), ...correctionBadges(row),
        row.hints ? make("span", { class: "chip" }, pluralize(row.hints, "hint")) : null,
        row.user_hints ? make("span", { class: "chip user-hint" }, pluralize(row.user_hints, "own hint")) : null,
        hasDraft ? make("span", { class: "chip draft" }, "unsaved hint") : null)));
}

export function showHintsFile(file) {
  byId("hints-file").replaceChildren(make("b", {}, pluralize(file.count, "hint")), " in ", make("code", {}, file.path));
  byId("problem").hidden = file.problem === null;
  byId("problem").textContent = file.problem === null ? "" : `Hints cannot be saved: ${file.problem}`;
  byId("recipe").textContent = file.recipe.trim();
}
