// A round's trie, drawn when it is asked for.

const HEIGHT = 24, ROW = 34, GAP = 14, TOP = 44;

// A path keeps its row; what leaves it gets rows below, the deepest first, so that no line crosses a box:
//
//   a - b - c - d
//       |   `-- x        leaves at depth 2
//       `-- y - z        leaves at depth 1
//
// The target's own token where it stopped is a node too; where it leaves the first row, it stands above it.
function layout(round) {
  const { tokens, parents, depths, blocks } = round.trie;
  const nodes = tokens.map((token, n) => ({
    token, depth: depths[n], block: blocks[n], origin: round.origins[n], parent: parents[n], children: [],
    accepted: round.path.includes(n), offset: round.retained.indexOf(n) + 1, number: n,
  }));
  for (const node of nodes.slice(1)) nodes[node.parent].children.push(node);
  const stop = nodes[round.path.at(-1)];
  const own = { token: round.trie.target_tokens[stop.number], depth: stop.depth + 1, block: -1, origin: "t",
    parent: stop.number, children: [], accepted: true, offset: 0, number: nodes.length };
  const extra = stop.children.length > 0;
  stop.children.push(own);
  nodes.push(own);

  let last = 0;
  const place = (first, row) => {
    const leaving = [];
    for (let node = first; node; ) {
      node.row = row;
      const next = node.children.find((child) => child.block === node.block) ?? node.children[0];
      leaving.push(...node.children.filter((child) => child !== next).reverse());
      node = next;
    }
    for (const child of leaving.sort((a, b) => b.depth - a.depth)) {
      if (child === own && row === 0) child.row = -1;
      else place(child, ++last);
    }
  };
  place(nodes[0], 0);
  const above = extra && own.row === -1 ? 1 : 0;
  for (const node of nodes) node.row += above;
  return { nodes, rows: last + 1 + above, depths: Math.max(...nodes.map((node) => node.depth)) + 1 };
}

function drawTrie(round) {
  const { nodes, rows, depths } = layout(round);
  const sites = Array.from({ length: depths }, () => []);
  for (const block of round.drafted.slice(1)) if (block.site !== null) sites[block.site].push(block.offset);

  const widths = sites.map((offsets, depth) => {
    const longest = Math.max(0, ...nodes.filter((n) => n.depth === depth).map((n) => line(n.token).length + (n.offset ? 3 : 0)));
    return Math.min(Math.max(44, longest * 7.4 + 30), 150);
  });
  const lefts = [0];
  for (const width of widths) lefts.push(lefts.at(-1) + width + GAP);
  const top = (row) => TOP + row * ROW;

  const trie = el("div", "trie");
  trie.setAttribute("role", "img");
  trie.setAttribute("aria-label", `Trie of ${plural(round.trie.tokens.length, "node")}; the blocks are in the table below.`);
  trie.style.width = `${lefts.at(-1)}px`;
  trie.style.height = `${top(rows)}px`;
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("width", lefts.at(-1));
  svg.setAttribute("height", top(rows));
  const path = (d, classes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", "path");
    element.setAttribute("d", d);
    if (classes) element.setAttribute("class", classes);
    svg.append(element);
  };

  // The baseline block's end, and where shifted blocks attach.
  const end = round.drafted[0].length;
  if (end < depths) {
    path(`M${lefts[end] - GAP / 2} 0V${top(rows)}`, "end");
    const label = el("div", "end", "beyond the baseline block →");
    label.style.left = `${lefts[end]}px`;
    trie.append(label);
  }
  sites.forEach((offsets, depth) => {
    const head = el("div", "depth", depth ? `+${depth}` : `i = ${round.anchor}`);
    head.style.left = `${lefts[depth]}px`;
    head.style.top = "13px";
    trie.append(head);
    if (!offsets.length) return;
    const site = el("div", "site", `⌄d ${offsets.join(" ")}`);
    site.title = `attachment site t* = ${depth} of the shifted ${offsets.length > 1 ? "blocks" : "block"} d = ${offsets.join(", ")}`;
    site.style.left = `${lefts[depth]}px`;
    site.style.top = "27px";
    site.style.maxWidth = `${widths[depth] + GAP - 2}px`;
    trie.append(site);
  });

  // Accepted lines last: they lie above the others.
  for (const node of nodes.slice(1).sort((a, b) => a.accepted - b.accepted)) {
    const parent = nodes[node.parent], middle = top(node.row) + HEIGHT / 2;
    const right = lefts[parent.depth] + widths[parent.depth];
    if (parent.row === node.row) path(`M${right - 20} ${middle}H${lefts[node.depth]}`, node.accepted ? "accepted" : "");
    else path(`M${right + GAP / 2 - 2} ${top(parent.row) + HEIGHT / 2}V${middle}H${lefts[node.depth]}M${right} ${top(parent.row) + HEIGHT / 2}h${GAP / 2 - 2}`, node.accepted ? "accepted" : "");
  }
  trie.append(svg);

  for (const node of nodes) {
    const box = el("div", `node ${node.origin}${node.accepted ? " accepted" : ""}${node.offset ? " retained" : ""}${node.block < 0 ? " own" : ""}`);
    box.style.left = `${lefts[node.depth]}px`;
    box.style.top = `${top(node.row)}px`;
    box.style.width = `${widths[node.depth]}px`;
    box.append(el("span", "shape", ORIGINS[node.origin].shape), appendToken(el("span", "word"), node.token, false));
    if (node.offset) box.append(el("span", "state", `h̃${node.offset}`));
    box.title = about(round, node);
    trie.append(box);
  }
  return trie;
}

function about(round, node) {
  const lines = [`${line(node.token)}  (token ${node.token}, position ${round.anchor + node.depth})`];
  if (node.number === 0) lines.push("the anchor: the last round's own token of the target");
  else if (node.block < 0) lines.push("the target's own token: the next anchor");
  else {
    lines.push(`${ORIGINS[node.origin].name}, d = ${node.block}, ${node.accepted ? "accepted" : "rejected"}`);
  }
  if (node.block >= 0) lines.push(`the target's token behind it: ${line(round.trie.target_tokens[node.number])}`);
  if (node.offset) lines.push(`its verifier state is retained: the next round's block d = ${node.offset} starts from that token`);
  return lines.join("\n");
}
