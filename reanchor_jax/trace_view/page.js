// Selecting of texts and rounds. Only the selected text and the selected round are in the document.

const read = (id) => JSON.parse(document.getElementById(id).textContent);
const $ = (id) => document.getElementById(id);
const PIECES = Object.assign(Object.create(null), read("pieces"));
const OVERVIEW = read("overview");
const KINDS = { b: "baseline", r: "refinement", e: "extension", t: "target" };
let number = 0, text = null, selected = -1, groups = [], bars = [];

function share(count, total) {
  return total ? `${(100 * count / total).toFixed(1)}%` : "–";
}

// Origins of what a round committed, the clipped ones left out.
function roundOrigins(round) {
  return text.origins.slice(round.start, round.start + round.path.length - round.clipped);
}

function count(origins, kind) {
  return origins.split(kind).length - 1;
}

function showOverview() {
  document.title = `Trace ${OVERVIEW.name}`;
  $("name").textContent = OVERVIEW.name;
  $("settings").textContent = OVERVIEW.settings;
  for (const notice of OVERVIEW.notices) $("notices").append(el("p", "notice", notice));
  if (!OVERVIEW.texts.length) $("notices").append(el("p", "notice", "The trace holds no texts."));
  OVERVIEW.texts.forEach((entry, n) => {
    const words = Array.from(entry.words, (c) => (HIDDEN.test(c) ? name(c) : c)).join("");
    const option = el("option", "", `prompt ${entry.index}, turn ${entry.turn}: ${words} (${plural(entry.rounds, "round")})`);
    option.value = n;
    $("texts").append(option);
  });
}

function showNumbers(entry) {
  const mean = entry.rounds ? (entry.nodes / entry.rounds).toFixed(1) : "0";
  $("numbers").textContent = `tau ${entry.tau.toFixed(2)} tokens per round, ${plural(entry.rounds, "round")}, `
    + `${plural(entry.tokens, "token")}${entry.clipped ? ` and ${entry.clipped} beyond the end` : ""}, ${mean} nodes per round`
    + `${entry.cut ? `, ${entry.cut} cut by the budget` : ""}`;
  const several = OVERVIEW.texts.length > 1;
  const head = el("tr");
  head.append(el("th"), el("th", "number", "tokens"), el("th", "number", "share"));
  if (several) head.append(el("th", "number", "all texts"), el("th", "number", "share"));
  $("legend").tHead.replaceChildren(head);
  $("legend").tBodies[0].replaceChildren(...Object.keys(KINDS).map((kind) => {
    const row = el("tr"), label = el("th", kind);
    label.scope = "row";
    label.title = ORIGINS[kind].about;
    label.append(el("span", "shape", ORIGINS[kind].shape), el("span", `token ${kind}`, ORIGINS[kind].name));
    row.append(label);
    for (const each of several ? [entry, OVERVIEW.all] : [entry]) {
      const tokens = each.origins[KINDS[kind]];
      row.append(el("td", "number", String(tokens)), el("td", "number", share(tokens, each.tokens)));
    }
    return row;
  }));
}

function showText() {
  const prompt = el("details"), ids = el("div", "prompt");
  prompt.append(el("summary", "faint", `prompt, ${plural(text.prompt.length, "token")}`), ids);
  prompt.addEventListener("toggle", () => {
    if (!ids.firstChild) for (const token of text.prompt) appendToken(ids, token, true);
  });
  const spans = (start, end) => {
    const group = el("span", "group");
    for (let n = start; n < end; n++) group.append(tokenSpan(text.tokens[n], text.origins[n], true));
    return group;
  };
  const first = spans(0, text.rounds.length ? text.rounds[0].start : text.tokens.length);
  first.title = "out of prefill, before the first round";
  first.classList.remove("group");
  groups = text.rounds.map((round, n) => {
    const group = spans(round.start, round.start + roundOrigins(round).length);
    group.dataset.round = n;
    group.title = `round ${n + 1}`;
    return group;
  });
  const end = text.end === null ? "interrupted" : `ended: ${text.end}`;
  $("text").replaceChildren(prompt, first, ...groups, el("p", "faint", end));
  bars = text.rounds.map((round, n) => {
    const bar = el("button");
    bar.type = "button";
    bar.tabIndex = -1;
    bar.dataset.round = n;
    bar.title = `round ${n + 1}: ${summary(round)}`;
    bar.setAttribute("aria-label", bar.title);
    for (const origin of roundOrigins(round)) bar.append(el("i", origin));
    return bar;
  });
  $("strip").replaceChildren(...bars);
  $("all").open = false;
  $("all").querySelector("table")?.remove();
}

function summary(round) {
  const origins = roundOrigins(round);
  const parts = Object.keys(KINDS).filter((kind) => count(origins, kind)).map((kind) => `${count(origins, kind)} ${KINDS[kind]}`);
  const clipped = round.clipped ? `, ${round.clipped} of them beyond the end` : "";
  return `${plural(round.path.length, "token")} committed${clipped}${parts.length ? `: ${parts.join(", ")}` : ""}`;
}

function showRound() {
  const round = text.rounds[selected];
  if (!round) {
    $("round").replaceChildren(el("p", "faint", "This text has no rounds."));
    return;
  }
  const bar = el("div", "bar"), step = (by, label, words) => {
    const button = el("button", "", label);
    button.type = "button";
    button.setAttribute("aria-label", words);
    button.disabled = !text.rounds[selected + by];
    button.addEventListener("click", () => select(selected + by));
    return button;
  };
  bar.append(el("h2", "", `Round ${selected + 1} of ${text.rounds.length}`), step(-1, "←", "previous round"), step(1, "→", "next round"));
  const shifted = round.drafted.slice(1), attached = shifted.filter((block) => block.site !== null).length;
  const rest = [plural(round.trie.tokens.length, "node"), `${round.cut} cut by the budget`,
    `${plural(shifted.length, "shifted block")}, ${attached} attached`, `${plural(round.retained.length, "verifier state")} retained`];
  const trie = el("div", "wide");
  trie.tabIndex = 0;
  trie.setAttribute("aria-label", "Trie, scrolls sideways");
  trie.setAttribute("role", "region");
  trie.append(drawTrie(round));
  const key = el("p", "hint", "Thick line: accepted path, ending in the target's own token. Dashed: rejected. h̃ and a bar below: "
    + "rejected suffix, its verifier state retained; the number is the offset d of the next round's block that starts "
    + "there. ⌄d: attachment site of shifted block d.");
  $("round").replaceChildren(bar, el("p", "", summary(round)), el("p", "faint", rest.join("; ")), trie, key, blockTable(round));
  // Where verification stopped is in sight; with a short path so is the anchor.
  const own = trie.querySelector(".own");
  trie.scrollLeft = own.offsetLeft + own.offsetWidth + 150 - trie.clientWidth;
}

// Every drafted block: where it attached, and which of its tokens were verified and accepted.
function blockTable(round) {
  const children = new Map(round.trie.tokens.map((token, n) => [`${round.trie.parents[n]} ${token}`, n]));
  const wide = el("div", "wide"), table = el("table", "blocks"), head = el("tr");
  wide.tabIndex = 0;
  head.append(...["block", "site t*", "tokens, anchor first"].map((words) => el("th", "", words)));
  table.createTHead().append(head);
  const body = table.createTBody();
  for (const block of round.drafted) {
    const row = body.insertRow(), dropped = block.site === null;
    row.append(el("td", "", block.offset ? `d = ${block.offset}` : "baseline"));
    row.append(el("td", dropped ? "faint" : "", dropped ? "no match" : block.offset ? String(block.site) : ""));
    const cell = row.insertCell();
    let node = -1;
    if (!dropped) for (const token of round.drafted[0].tokens.slice(0, block.site)) node = children.get(`${node} ${token}`);
    block.tokens.forEach((token, k) => {
      node = dropped || node === undefined || k >= block.length ? undefined : children.get(`${node} ${token}`);
      const origin = node === undefined ? "t" : round.origins[node];
      const state = node === undefined ? "unverified" : round.path.includes(node) ? "accepted" : "";
      cell.append(tokenSpan(token, origin, false, state));
    });
  }
  table.createCaption().textContent = "Blocks";
  wide.append(table, el("p", "hint", "Bold: on the accepted path. Struck out: not verified (dropped, cut by the budget or by the schedule)."));
  return wide;
}

function showTable() {
  if (!$("all").open || $("all").querySelector("table")) return;
  const table = el("table"), head = el("tr");
  const names = ["round", "anchor at", "committed", ...Object.values(KINDS), "beyond the end", "nodes", "cut", "shifted blocks", "attached", "retained"];
  head.append(...names.map((words) => el("th", "", words)));
  table.createTHead().append(head);
  const body = table.createTBody();
  text.rounds.forEach((round, n) => {
    const origins = roundOrigins(round), shifted = round.drafted.slice(1);
    const row = body.insertRow();
    row.dataset.round = n;
    const values = [n + 1, round.anchor, round.path.length, ...Object.keys(KINDS).map((kind) => count(origins, kind)), round.clipped,
      round.trie.tokens.length, round.cut, shifted.length, shifted.filter((b) => b.site !== null).length, round.retained.length];
    row.append(...values.map((value) => el("td", "", String(value))));
  });
  const wide = el("div", "wide");
  wide.append(table);
  $("all").querySelector(".wide")?.remove();
  $("all").append(wide);
}

function select(n) {
  if (n < 0 || n >= text.rounds.length) return;
  for (const [list, mark] of [[groups, (e, on) => e.classList.toggle("selected", on)],
    [bars, (e, on) => { e.setAttribute("aria-pressed", on); e.tabIndex = on ? 0 : -1; }]]) {
    if (list[selected]) mark(list[selected], false);
    mark(list[n], true);
  }
  selected = n;
  if (document.activeElement?.parentElement === $("strip")) bars[n].focus();
  reveal($("text"), groups[n], "top", "height");
  reveal($("strip"), bars[n], "left", "width");
  showRound();
  $("said").textContent = `round ${n + 1} of ${text.rounds.length}: ${summary(text.rounds[n])}`;
  remember();
}

// Scrolls a panel, never the page, so far that a part of it can be seen.
function reveal(panel, part, side, size) {
  const outer = panel.getBoundingClientRect(), inner = part.getBoundingClientRect();
  if (inner[side] < outer[side] || inner[side] + inner[size] > outer[side] + outer[size]) {
    panel[side === "top" ? "scrollTop" : "scrollLeft"] += inner[side] - outer[side] - outer[size] / 3;
  }
}

function open(n, round) {
  if (!OVERVIEW.texts[n]) return;
  number = n;
  text = read(`text-${n}`);
  selected = -1;
  $("texts").value = n;
  showNumbers(OVERVIEW.texts[n]);
  showText();
  if (text.rounds.length) select(Math.min(round, text.rounds.length - 1));
  else { showRound(); remember(); }
}

// The address names text and round, from 1: `#2.17`.
function remember() {
  try { history.replaceState(null, "", `#${number + 1}.${selected + 1}`); } catch { /* not from a file everywhere */ }
}

function fromAddress() {
  const [, n, round] = /^#(\d+)\.(\d+)$/.exec(location.hash) ?? [0, 1, 1];
  open(Math.max(Math.min(n, OVERVIEW.texts.length) - 1, 0), Math.max(round - 1, 0));
}

function chosen(event) {
  const part = event.target.closest("[data-round]");
  if (part) select(Number(part.dataset.round));
}

function pressed(event) {
  if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey || !text) return;
  if (event.target.closest("select, .wide") && /^(Arrow|Home|End)/.test(event.key)) return; // they have a use there
  const rounds = text.rounds.length;
  const actions = {
    ArrowRight: () => select(selected + 1), ArrowLeft: () => select(selected - 1),
    Home: () => select(0), End: () => select(rounds - 1),
    "]": () => open(number + 1, 0), "[": () => open(number - 1, 0),
  };
  if (!actions[event.key]) return;
  event.preventDefault();
  actions[event.key]();
}

const THEMES = ["system", "light", "dark"];
$("theme").addEventListener("click", () => {
  const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "system") + 1) % THEMES.length];
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
});
for (const id of ["text", "strip", "all"]) $(id).addEventListener("click", chosen);
$("all").addEventListener("toggle", showTable);
$("texts").addEventListener("change", () => open(Number($("texts").value), 0));
document.addEventListener("keydown", pressed);
addEventListener("hashchange", fromAddress);
showOverview();
fromAddress();
