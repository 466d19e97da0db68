// The person's own hint above one turn: to write, edit and remove.

import { draftOf, keepDraft } from "./kept.js";
import { make, note } from "./parts.js";
import { Refusal, pathOf, send } from "./server.js";

const oneLine = (text) => text.trim().split(/\s+/).join(" ");

export class OwnHint {
  // `changed(own)` is called with the state of the hints file after each write; null: it is refused.
  constructor(trajectory, turn, limits, changed) {
    this.trajectory = trajectory;
    this.turn = turn;
    this.limits = limits;
    this.changed = changed;
    this.mine = turn.mine;
    this.area = null;
    this.place = make("div", { class: "own-hint" });
    if (this.draft() !== null) this.open(false);
    else this.show();
  }

  draft() {
    const text = draftOf(this.trajectory.hinted_id, this.turn.number);
    return text === null || text === (this.mine?.text ?? "") ? null : text;
  }

  // What the file says now, if somebody else has changed it. An open editor keeps its text.
  update(mine) {
    const same = (mine?.text ?? null) === (this.mine?.text ?? null);
    this.mine = mine;
    if (same) return;
    if (!this.area) this.show();
    else this.meanwhile.textContent = mine ? `Meanwhile in the file: ${mine.text}` : "Meanwhile removed from the file.";
  }

  show() {
    this.area = null;
    const open = () => this.open(true);
    if (!this.mine) {
      const words = this.draft() === null ? "+ write a hint" : "go on with your draft";
      this.place.replaceChildren(make("button", { type: "button", class: "write", onclick: open,
        "aria-label": `${words.replace("+ ", "")} above turn ${this.turn.number}` }, words));
      return;
    }
    const facts = make("div", { class: "facts-line" },
      this.mine.reason ? make("small", {}, this.mine.reason) : null,
      make("button", { type: "button", onclick: open }, this.draft() === null ? "edit" : "go on with your draft"),
      make("button", { type: "button", onclick: () => this.remove() }, "remove"));
    this.place.replaceChildren(line(facts, make("div", { class: "text" }, this.mine.text)));
  }

  open(focus) {
    this.area = make("textarea", { rows: "2", "aria-label": `Hint above turn ${this.turn.number}`,
      placeholder: "What the student overlooked and could have known. Not the answer.",
      oninput: () => this.written(), onkeydown: (event) => this.pressed(event) });
    this.area.value = this.draft() ?? this.mine?.text ?? "";
    this.number = make("span", { class: "chars" });
    this.save = make("button", { type: "button", class: "save", onclick: () => this.write() }, "save");
    this.discard = make("button", { type: "button", onclick: () => this.forget() }, "discard");
    const cancel = make("button", { type: "button", title: "Esc; what you wrote stays as a draft",
      onclick: () => this.close() }, "cancel");
    this.meanwhile = make("p", { class: "caption" });
    this.problem = make("p", { class: "problem", role: "alert" });
    const below = make("div", { class: "facts-line" }, this.save, cancel, this.discard,
      make("small", { class: "keys" }, "Ctrl+Enter saves, Esc cancels"), this.number);
    this.place.replaceChildren(line(this.area, below, this.meanwhile, this.problem));
    this.written();
    if (focus) {
      this.area.focus();
      this.area.setSelectionRange(this.area.value.length, this.area.value.length);
    }
  }

  written() {
    const size = [...oneLine(this.area.value)].length;
    const over = size > this.limits.max_chars;
    this.number.textContent = `${size.toLocaleString("en")} of ${this.limits.max_chars.toLocaleString("en")}`;
    this.number.classList.toggle("failed", over);
    this.save.disabled = size === 0 || over;
    const other = this.area.value !== (this.mine?.text ?? "");
    this.discard.hidden = !other;
    keepDraft(this.trajectory.hinted_id, this.turn.number, other && size ? this.area.value : null);
    this.area.style.height = "auto";
    this.area.style.height = `${this.area.scrollHeight + 2}px`;
  }

  pressed(event) {
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
    this.place.querySelector("button").focus();
  }

  forget() {
    keepDraft(this.trajectory.hinted_id, this.turn.number, null);
    this.close();
  }

  async write(text = this.area.value) {
    const { step, id } = this.trajectory;
    try {
      if (this.area) {
        this.save.disabled = true;
        this.problem.textContent = "";
      }
      const answer = await send("PUT", pathOf(step, id, this.turn.number), { text });
      keepDraft(this.trajectory.hinted_id, this.turn.number, null);
      this.mine = answer.mine;
      this.close();
      this.changed(answer.own);
    } catch (error) {
      this.failed(error);
    }
  }

  async remove() {
    const { step, id } = this.trajectory;
    const text = this.mine.text;
    try {
      const answer = await send("DELETE", pathOf(step, id, this.turn.number));
      this.mine = null;
      this.close();
      this.changed(answer.own);
      note("The hint is removed.", { name: "undo", run: () => this.write(text) });
    } catch (error) {
      this.failed(error);
    }
  }

  // The text stays where it is; the server's going away has a message of its own.
  failed(error) {
    const told = error instanceof Refusal ? error.message : "Not saved: the viewer does not answer.";
    if (this.area) {
      this.save.disabled = false;
      this.problem.textContent = told;
    } else {
      note(told);
    }
    if (error instanceof Refusal) this.changed(null);
  }
}

function line(...parts) {
  return make("div", { class: "entry hint mine" }, make("b", {}, "your hint"), make("div", {}, ...parts));
}
