// Unsaved hints. They survive polling, switching trajectories and a reload of the page.

let prefix = "courtside";
const memory = new Map(); // if the browser has no storage

export function setRun(path) {
  prefix = `courtside ${path} `;
}

const key = (id, turn) => `${prefix}${turn} ${id}`;

export function getDraft(id, turn) {
  try {
    return localStorage.getItem(key(id, turn));
  } catch {
    return memory.get(key(id, turn)) ?? null;
  }
}

export function saveDraft(id, turn, text) {
  try {
    if (text === null) localStorage.removeItem(key(id, turn));
    else localStorage.setItem(key(id, turn), text);
  } catch {
    if (text === null) memory.delete(key(id, turn));
    else memory.set(key(id, turn), text);
  }
}

// Ids, as in the hints file, of the trajectories with a draft.
export function draftedIds() {
  let keys = [...memory.keys()];
  try {
    keys = keys.concat(Object.keys(localStorage));
  } catch { /* no storage */ }
  const names = keys.filter((name) => name.startsWith(prefix)).map((name) => name.slice(prefix.length));
  return new Set(names.map((name) => name.slice(name.indexOf(" ") + 1)));
}
