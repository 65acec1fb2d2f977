/* ---- conversations, kept in this browser (IndexedDB); without it, as long as the page ----
   A conversation is {id, title, changed, head, turns}. Its turns are a tree: an edit or another
   answer is a branch of its own, and `head` is the last turn of the branch that is shown. A turn is
   {id, parent, role, content, ...}: reasoning, calls, tokens, counts and note of an answer. */
const newId = () => [...crypto.getRandomValues(new Uint8Array(12))].map(byte => byte.toString(16).padStart(2, "0")).join("");
const newConversation = () => ({ id: newId(), title: "", changed: Date.now(), head: null, turns: {} });
const store = {
  unkept: new Map(),
  removed: new Set(), // ids of conversations and turns that are not to come back
  opened: null,
  open() {
    this.opened ??= new Promise(done => {
      try {
        const asked = indexedDB.open("actorium", 1);
        asked.onupgradeneeded = () => asked.result.createObjectStore("conversations", { keyPath: "id" });
        asked.onsuccess = () => done(asked.result);
        asked.onerror = asked.onblocked = () => done(null);
      } catch { done(null); }
    });
    return this.opened;
  },
  /* Runs `use` with the objects, and waits until what it changed is written. */
  async run(mode, use) {
    const database = await this.open();
    if (!database) return undefined;
    return new Promise((done, fail) => {
      const change = database.transaction("conversations", mode), asked = use(change.objectStore("conversations"));
      change.oncomplete = () => done(asked && asked.result);
      change.onerror = change.onabort = () => fail(change.error || new Error("This browser keeps no more conversations."));
    });
  },
  async all() {
    const found = await this.run("readonly", objects => objects.getAll());
    return (found || [...this.unkept.values()]).sort((a, b) => b.changed - a.changed);
  },
  /* Writes a conversation; turns that another tab has added to it stay. */
  async put(conversation) {
    if (this.removed.has(conversation.id)) return;
    this.unkept.set(conversation.id, conversation);
    await this.run("readwrite", objects => {
      const old = objects.get(conversation.id);
      old.onsuccess = () => {
        for (const [id, turn] of Object.entries(old.result ? old.result.turns : {})) if (!this.removed.has(id)) conversation.turns[id] ??= turn;
        objects.put(conversation);
      };
    });
  },
  async remove(id) {
    this.removed.add(id);
    this.unkept.delete(id);
    await this.run("readwrite", objects => objects.delete(id));
  },
};

/* ---- the tree of turns ---- */
/* The turns that are shown, from the first one on. */
function branchOf(conversation) {
  const found = [];
  for (let turn = conversation.turns[conversation.head]; turn; turn = conversation.turns[turn.parent]) found.unshift(turn);
  return found;
}
/* The turns in whose place a turn stands, itself included, oldest first. */
const siblings = (conversation, turn) => Object.values(conversation.turns).filter(one => one.parent === turn.parent).sort((a, b) => a.at - b.at);
/* The newest turn that follows from a turn. */
function newestLeaf(conversation, turn) {
  for (;;) {
    const after = Object.values(conversation.turns).filter(one => one.parent === turn.id).sort((a, b) => b.at - a.at);
    if (!after.length) return turn;
    turn = after[0];
  }
}
function addTurn(conversation, parent, fields) {
  const before = conversation.turns[parent]; // no two turns of a branch have one time
  const turn = { id: newId(), parent, at: Math.max(Date.now(), before ? before.at + 1 : 0), ...fields };
  conversation.turns[turn.id] = turn;
  conversation.head = turn.id;
  conversation.changed = turn.at;
  return turn;
}
/* What a file may say to be taken in: conversations whose turns are a tree of roles and texts. */
function imported(text) {
  const given = JSON.parse(text), list = given && given.conversations;
  if (!Array.isArray(list)) throw new Error("there is no list `conversations` in it");
  return list.map((one, i) => {
    const made = { ...newConversation(), title: String(one.title || "").slice(0, 200), changed: Number(one.changed) || Date.now() };
    for (const turn of Object.values(one.turns || {})) {
      if (!["user", "assistant", "tool"].includes(turn.role) || typeof turn.id !== "string") throw new Error(`conversations[${i}] has a turn without a role or an id`);
      const { pending, ...rest } = turn; // nothing goes on in another browser
      if (typeof rest.content !== "string" && !Array.isArray(rest.content)) throw new Error(`conversations[${i}] has a turn without content`);
      made.turns[turn.id] = { ...rest, parent: rest.parent ?? null, at: Number(rest.at) || 0 };
    }
    for (const turn of Object.values(made.turns)) {
      if (turn.parent !== null && !(made.turns[turn.parent] && made.turns[turn.parent].at < turn.at)) throw new Error(`conversations[${i}] has a turn whose parent is not there`);
    }
    made.head = typeof one.head === "string" && made.turns[one.head] ? one.head : null;
    if (!made.head && Object.keys(made.turns).length) made.head = newestLeaf(made, Object.values(made.turns)[0]).id;
    return made;
  });
}
