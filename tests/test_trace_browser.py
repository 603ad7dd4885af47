"""The page of a trace in a headless Chromium: what is shown, keys, speed, and that nothing runs or leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from reanchor_jax.trace_view.page import make_page
from reanchor_jax.trace_view.read import read_trace
from tests import chromium, trace_files
from tests.test_trace_view import HOSTILE, hostile_trace

pytestmark = pytest.mark.skipif(chromium.PROGRAM is None, reason="no Chromium on this machine")

SECONDS_TO_LOAD, SECONDS_TO_STEP = 5.0, 0.25
"""Far above what is measured (0.3 and 0.01): a machine under load passes, a page that draws all rounds does not."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = chromium.Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def open_page(browser: chromium.Browser, path: Path, place: str = "") -> None:
    out = path.with_suffix(".html")
    out.write_text(make_page(read_trace(path), path.name), encoding="utf-8")
    browser.resize(1200, 900)
    browser.open(f"{out.as_uri()}{place}")


def faults(browser: chromium.Browser) -> list[dict]:
    return [event for event in browser.events if event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]


def requests(browser: chromium.Browser) -> list[str]:
    events = [event for event in browser.events if event["method"] == "Network.requestWillBeSent"]
    return [event["params"]["request"]["url"] for event in events]


def heading(browser: chromium.Browser) -> str:
    return browser.run("document.querySelector('#round h2').textContent")


def test_text_trie_and_legend_of_the_trace_by_hand(browser, tmp_path):
    open_page(browser, trace_files.write(tmp_path / "hand.jsonl", trace_files.hand_trace()))
    shown = browser.run("[...document.querySelectorAll('#text .token')].map(t => [t.textContent, t.className.trim()])")
    assert shown == [
        [f" t{token}", f"token {origin}"] for token, origin in zip([10, 11, 14, 15, 16, 17, 20], "tbrretb", strict=True)
    ]
    rows = browser.run(
        "[...document.querySelectorAll('#legend tbody tr')].map(r => r.innerText.replaceAll(/\\s+/g, ' '))"
    )
    assert [row.rsplit(" ", 2)[1:] for row in rows] == [["2", "28.6%"], ["2", "28.6%"], ["1", "14.3%"], ["2", "28.6%"]]
    assert "tau 3.50" in browser.run("document.getElementById('numbers').textContent")
    nodes = "[...document.querySelectorAll('.node')]"
    accepted = browser.run(
        f"{nodes}.filter(n => n.matches('.accepted')).map(n => n.querySelector('.word').textContent)"
    )
    assert sorted(accepted) == [" t10", " t11", " t14", " t15", " t16", " t17"]
    assert (
        browser.run("document.querySelector('.trie .site').title")
        == "attachment site t* = 1 of the shifted block d = 1"
    )
    assert "no match" in browser.run("document.querySelector('.blocks').innerText")
    # No two boxes of a trie lie on each other.
    boxes = browser.run(f"{nodes}.map(n => [n.offsetLeft, n.offsetTop, n.offsetWidth])")
    assert len({(left, top) for left, top, _ in boxes}) == len(boxes) == 8
    browser.press("ArrowRight")
    states = browser.run(f"{nodes}.filter(n => n.matches('.retained')).map(n => n.innerText.replaceAll(/\\s+/g, ' '))")
    assert heading(browser) == "Round 2 of 2" and [state[-2:] for state in states] == ["̃1", "̃2"]
    assert faults(browser) == []


def test_keys_pointer_and_address_select_texts_and_rounds(browser, tmp_path):
    path = trace_files.write(tmp_path / "random.jsonl", trace_files.random_trace(2, 9, 6))
    open_page(browser, path, "#2.4")
    place = "[document.getElementById('texts').value, location.hash]"
    assert heading(browser) == "Round 4 of 9" and browser.run(place) == ["1", "#2.4"]
    for key, round_number in (
        ("ArrowRight", 5),
        ("ArrowLeft", 4),
        ("Home", 1),
        ("ArrowLeft", 1),
        ("End", 9),
        ("ArrowRight", 9),
    ):
        browser.press(key)
        assert heading(browser) == f"Round {round_number} of 9", key
        assert browser.run("document.querySelector('.group.selected').title") == f"round {round_number}"
        assert browser.run("document.querySelectorAll('#strip [aria-pressed=true]').length") == 1
    browser.press("[")
    assert heading(browser) == "Round 1 of 9" and browser.run(place) == ["0", "#1.1"]
    browser.press("]")
    assert browser.run(place) == ["1", "#2.1"]
    browser.run("document.querySelectorAll('#text .group')[2].firstChild.click()")
    assert heading(browser) == "Round 3 of 9"
    browser.run("document.querySelectorAll('#strip button')[6].click()")
    assert heading(browser) == "Round 7 of 9"
    # The keys of a list of choices stay its own.
    browser.run("document.getElementById('texts').focus()")
    browser.press("End")
    assert heading(browser) == "Round 7 of 9"
    browser.run("document.activeElement.blur(); document.getElementById('all').open = true")
    assert (
        browser.run(
            "new Promise(done => setTimeout(() => done(document.querySelectorAll('#all tbody tr').length), 50))"
        )
        == 9
    )
    browser.run("document.querySelectorAll('#all tbody tr')[1].cells[0].click()")
    assert heading(browser) == "Round 2 of 9" and faults(browser) == []


def test_300_rounds_load_and_step_without_lag(browser, tmp_path):
    path = trace_files.write(tmp_path / "long.jsonl", trace_files.random_trace(2, 300, 16))
    open_page(browser, path)
    load = browser.run("performance.getEntriesByType('navigation')[0].loadEventEnd / 1000")
    # A step as a person sees it: from the key to the frame behind it.
    step = """new Promise(done => { const times = []; const next = () => {
        const start = performance.now();
        document.body.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}));
        document.body.offsetHeight;
        times.push((performance.now() - start) / 1000);
        times.length < 50 ? setTimeout(next) : done(times.sort((a, b) => a - b));
    }; next(); })"""
    times = browser.run(step)
    print(f"load {load:.3f} s, step median {times[25]:.4f} s, slowest {times[-1]:.4f} s")
    assert load < SECONDS_TO_LOAD and times[25] < SECONDS_TO_STEP
    assert heading(browser) == "Round 51 of 300"
    assert browser.run("document.querySelectorAll('.trie').length") == 1
    assert browser.run("document.querySelectorAll('#text .token').length") > 1500
    # The selected round's tokens and bar are in sight.
    for panel, part in (("#text", ".group.selected"), ("#strip", "[aria-pressed=true]")):
        inside = f"""(() => {{
            const [a, b] = ['{panel}', '{panel} {part}'].map(s => document.querySelector(s).getBoundingClientRect());
            return b.top >= a.top - 1 && b.bottom <= a.bottom + 1 && b.left >= a.left - 1 && b.right <= a.right + 1;
        }})()"""
        assert browser.run(inside), panel


def test_hostile_texts_are_shown_and_do_nothing(browser, tmp_path):
    path = hostile_trace(tmp_path / "hostile.jsonl")
    open_page(browser, path)
    assert browser.run("document.querySelectorAll('script:not([type]), img, iframe, b').length") == 1
    shown = browser.run("[...document.querySelectorAll('#text .token')].map(t => t.textContent)")
    assert shown[:4] == HOSTILE[:4]
    assert shown[4:] == ["⟨U+202E⟩abc", "⟨U+D800⟩", "␀␇␛[31m"]
    browser.run("document.querySelector('#text details').open = true")
    prompt = "new Promise(done => setTimeout(() => done(document.querySelector('.prompt').textContent), 50))"
    assert browser.run(prompt) == "', \"👩⟨U+200D⟩🚀 t3"
    assert browser.run("document.getElementById('settings').textContent").startswith(HOSTILE[0])
    assert faults(browser) == [] and requests(browser) == [path.with_suffix(".html").as_uri()]


def test_the_policy_lets_nothing_else_in(browser, tmp_path):
    """Even code that got into the page could load and send nothing."""
    open_page(browser, trace_files.write(tmp_path / "hand.jsonl", trace_files.hand_trace()))
    browser.run("""(() => {
        const add = (tag, more) => document.body.append(Object.assign(document.createElement(tag), more));
        add('script', {textContent: 'window.ran = true'});
        add('img', {src: 'https://example.org/x.png'});
        add('style', {textContent: 'body { display: none }'});
        document.body.insertAdjacentHTML('beforeend', '<p onclick="window.ran = true">');
        document.body.lastChild.click();
    })()""")
    assert browser.run("fetch('https://example.org').then(() => 'sent', () => 'refused')") == "refused"
    assert browser.run("window.ran ?? getComputedStyle(document.body).display") == "block"
    blocked = [event for event in faults(browser) if "Content Security Policy" in event["params"]["entry"]["text"]]
    assert len(blocked) >= 5, faults(browser)


def test_light_dark_and_narrow(browser, tmp_path):
    path = trace_files.write(tmp_path / "random.jsonl", trace_files.random_trace(2, 40, 16))
    open_page(browser, path, "#1.3")
    background = "getComputedStyle(document.body).backgroundColor"
    browser.prefer("dark")
    dark = browser.run(background)
    browser.prefer("light")
    light = browser.run(background)
    assert light == "rgb(255, 255, 255)" and dark != light
    for expected in (light, dark):  # the button goes from the system's setting to light, then to dark
        browser.run("document.getElementById('theme').click()")
        assert browser.run(background) == expected
    for width in (1200, 700, 360):
        browser.resize(width, 800)
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.run("document.getElementById('legend').getBoundingClientRect().right") <= width
    # Colour is never alone: every origin has its own line and its own shape.
    lines = "[...'bret'].map(o => getComputedStyle(document.querySelector('#legend .token.' + o)).textDecorationStyle)"
    shapes = "[...document.querySelectorAll('#legend .shape')].map(s => s.textContent)"
    assert len(set(browser.run(lines))) == len(set(browser.run(shapes))) == 4


@pytest.mark.parametrize("lines", [1, 2, 3])
def test_what_an_interrupted_run_left_opens(browser, tmp_path, lines):
    path = trace_files.write(tmp_path / "short.jsonl", trace_files.hand_trace()[:lines])
    open_page(browser, path)
    assert "no texts of tokens" in browser.run("document.getElementById('notices').textContent")
    assert faults(browser) == []
    if lines == 3:
        assert browser.run("document.querySelector('#text .token').textContent") == "⟨10⟩"
