// The user's hint before one turn: write, edit and remove it.

import { getDraft, saveDraft } from "./drafts.js";
import { make, notify } from "./dom.js";
import { ApiError, apiPath, send } from "./api.js";

const oneLine = (text) => text.trim().split(/\s+/).join(" ");

export class HintEditor {
  // `onChange(file)` gets the state of the hints file after each write; null: the write failed.
  constructor(trajectory, turn, limits, onChange) {
    this.trajectory = trajectory;
    this.turn = turn;
    this.limits = limits;
    this.onChange = onChange;
    this.hint = turn.user_hint;
    this.area = null;
    this.element = make("div", { class: "hint-editor" });
    if (this.draft() !== null) this.open(false);
    else this.show();
  }

  draft() {
    const text = getDraft(this.trajectory.hints_file_id, this.turn.number);
    return text === null || text === (this.hint?.text ?? "") ? null : text;
  }

  // The hint as the file has it now. An open editor keeps its text.
  update(hint) {
    const isSame = (hint?.text ?? null) === (this.hint?.text ?? null);
    this.hint = hint;
    if (isSame) return;
    if (!this.area) this.show();
    else this.conflict.textContent = hint ? `Changed in the file: ${hint.text}` : "Removed from the file.";
  }

  show() {
    this.area = null;
    const open = () => this.open(true);
    if (!this.hint) {
      const label = this.draft() === null ? "+ write a hint" : "continue your draft";
      this.element.replaceChildren(make("button", { type: "button", class: "write", onclick: open,
        "aria-label": `${label.replace("+ ", "")} before turn ${this.turn.number}` }, label));
      return;
    }
    const facts = make("div", { class: "facts-line" },
      this.hint.reason ? make("small", {}, this.hint.reason) : null,
      make("button", { type: "button", onclick: open }, this.draft() === null ? "edit" : "continue your draft"),
      make("button", { type: "button", onclick: () => this.remove() }, "remove"));
    this.element.replaceChildren(entry(facts, make("div", { class: "text" }, this.hint.text)));
  }

  open(focus) {
    this.area = make("textarea", { rows: "2", "aria-label": `Hint before turn ${this.turn.number}`,
      placeholder: "What the student missed and could have known, not the answer.",
      oninput: () => this.onInput(), onkeydown: (event) => this.onKey(event) });
    this.area.value = this.draft() ?? this.hint?.text ?? "";
    this.counter = make("span", { class: "chars" });
    this.save = make("button", { type: "button", class: "save", onclick: () => this.write() }, "save");
    this.discard = make("button", { type: "button", onclick: () => this.discardDraft() }, "discard");
    const cancel = make("button", { type: "button", title: "Esc; the text stays as a draft",
      onclick: () => this.close() }, "cancel");
    this.conflict = make("p", { class: "caption" });
    this.problem = make("p", { class: "problem", role: "alert" });
    const below = make("div", { class: "facts-line" }, this.save, cancel, this.discard,
      make("small", { class: "keys" }, "Ctrl+Enter saves, Esc cancels"), this.counter);
    this.element.replaceChildren(entry(this.area, below, this.conflict, this.problem));
    this.onInput();
    if (focus) {
      this.area.focus();
      this.area.setSelectionRange(this.area.value.length, this.area.value.length);
    }
  }

  onInput() {
    const numChars = [...oneLine(this.area.value)].length;
    const isTooLong = numChars > this.limits.max_chars;
    this.counter.textContent = `${numChars.toLocaleString("en")} of ${this.limits.max_chars.toLocaleString("en")}`;
    this.counter.classList.toggle("failed", isTooLong);
    this.save.disabled = numChars === 0 || isTooLong;
    const isChanged = this.area.value !== (this.hint?.text ?? "");
    this.discard.hidden = !isChanged;
    saveDraft(this.trajectory.hints_file_id, this.turn.number, isChanged && numChars ? this.area.value : null);
    this.area.style.height = "auto";
    this.area.style.height = `${this.area.scrollHeight + 2}px`;
  }

  onKey(event) {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      if (!this.save.disabled) this.write();
    } else if (event.key === "Escape") {
      event.preventDefault();
      this.close();
    }
    event.stopPropagation();
  }

  close() {
    this.show();
    this.element.querySelector("button").focus();
  }

  discardDraft() {
    saveDraft(this.trajectory.hints_file_id, this.turn.number, null);
    this.close();
  }

  async write(text = this.area.value) {
    const { key, id } = this.trajectory;
    try {
      if (this.area) {
        this.save.disabled = true;
        this.problem.textContent = "";
      }
      const answer = await send("PUT", apiPath(key, id, this.turn.number), { text });
      saveDraft(this.trajectory.hints_file_id, this.turn.number, null);
      this.hint = answer.user_hint;
      this.close();
      this.onChange(answer.hints_file);
    } catch (error) {
      this.onError(error);
    }
  }

  async remove() {
    const { key, id } = this.trajectory;
    const text = this.hint.text;
    try {
      const answer = await send("DELETE", apiPath(key, id, this.turn.number));
      this.hint = null;
      this.close();
      this.onChange(answer.hints_file);
      notify("Hint removed.", { name: "undo", run: () => this.write(text) });
    } catch (error) {
      this.onError(error);
    }
  }

  // The text stays; an unreachable server has its own message.
  onError(error) {
    const message = error instanceof ApiError ? error.message : "Not saved: the viewer does not answer.";
    if (this.area) {
      this.save.disabled = false;
      this.problem.textContent = message;
    } else {
      notify(message);
    }
    if (error instanceof ApiError) this.onChange(null);
  }
}

function entry(...parts) {
  return make("div", { class: "entry hint user-hint" }, make("b", {}, "your hint"), make("div", {}, ...parts));
}
