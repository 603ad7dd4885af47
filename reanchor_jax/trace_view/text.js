// Tokens that can be seen, whatever they hold. Nothing of a trace is ever parsed as HTML: text nodes only.

const ORIGINS = {
  b: { name: "baseline block", shape: "■", about: "a draft of the baseline block" },
  r: { name: "in-block refinement", shape: "◆", about: "a shifted block's draft, within the baseline block's positions" },
  e: { name: "extension", shape: "▶", about: "a shifted block's draft, beyond the baseline block's end" },
  t: { name: "the target's own token", shape: "○", about: "behind the last accepted draft, or the first token, of prefill" },
};

function el(tag, classes = "", text = "") {
  const element = document.createElement(tag);
  if (classes) element.className = classes;
  if (text !== "") element.textContent = text;
  return element;
}

// Characters that show nothing, move others about, or are half of one: control, format (zero width, direction),
// line and paragraph separators, lone surrogates.
const HIDDEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cs}]/u;

function name(character) {
  const code = character.codePointAt(0);
  if (character === "\n") return "↵";
  if (character === "\t") return "⇥";
  if (code < 32) return String.fromCodePoint(0x2400 + code); // ␀ ␁ ..
  return "⟨U+" + code.toString(16).toUpperCase().padStart(4, "0") + "⟩";
}

// Appends a token's text to an element, what cannot be seen by its name. `breaks`: a line break breaks.
function appendToken(element, token, breaks) {
  const piece = PIECES[token];
  if (!piece) { // a special token, or a trace without texts
    element.append(el("span", "mark", `⟨${token}⟩`));
    return element;
  }
  if (!breaks && /^ +$/.test(piece)) { // in a box, spaces alone would be an empty one
    element.append(el("span", "mark", "␣".repeat(piece.length)));
    return element;
  }
  let plain = "";
  for (const character of piece) {
    if (!HIDDEN.test(character)) { plain += character; continue; }
    element.append(plain, el("span", "mark", name(character)));
    plain = breaks && character === "\n" ? "\n" : "";
  }
  element.append(plain);
  return element;
}

// One line, for titles and lists.
function line(token) {
  const piece = PIECES[token];
  return piece ? Array.from(piece, (c) => (HIDDEN.test(c) ? name(c) : c)).join("") : `⟨${token}⟩`;
}

function tokenSpan(token, origin, breaks, more = "") {
  return appendToken(el("span", `token ${origin} ${more}`), token, breaks);
}

function plural(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}
