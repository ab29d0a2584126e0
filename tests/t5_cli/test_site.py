"""The site as a stranger opens it: built as `scripts/site` does, each question answered by the page that the menu leads to."""

from __future__ import annotations

import html
import json
import re
import subprocess
import threading
from collections.abc import Iterator
from functools import cache, partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import chromium
import pytest
import tools
from lakes import stepfs
from realmount import until

import face
from site_pages import reference
from site_pages.messages import VALUE, collected

# A question → the way through the menu, and words of the page that answer it.
QUESTIONS = {
    "what is it, and should I use it": ("Start/What it is", "a stream of training batches", "When not to use it", "mountpoint-s3"),
    "how do I install it on a node without a compiler": ("Start/Install", "without a compiler", "--no-index --find-links"),
    "what are all options of mount": ("Reference/Commands: stepfs", "stepfs mount", "--prefetch", "--spare", "STEPFS_CACHE_DIR"),
    "what are all keys of a plan": ("Reference/Plan keys", "sequence_length", "alpha", "at_most", "best_fit"),
    "what is the Python API": ("Reference/Python", "StreamState.load_state_dict", "AsyncProducer", "NoSuchStepError"),
    "what is metric X": ("Reference/Metrics and alerts", "stepfs_data_hedges_won_total", "Second requests that were faster"),
    "which variables exist": ("Reference/Variables", "STEPFS_LOG_DIR", "STEPFS_MEMORY", "what is typed wins"),
    "in which order do I upgrade 200 nodes, and back": (
        "Operate/Upgrade, versions, removal", "first mounts and readers, node by node", "then producers", "The way back", "--replace",
    ),
    "what do I do about this message": (
        "Operate/Troubleshooting by message", "exit code", "Corrupt", "is there already; name another",
    ),
    "how do I resume after a kill": ("Tasks/DDP, and resume after a kill", "goes on at step 4", "to the last bit"),
}  # fmt: skip


found = cache(collected)


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("site") / "out"
    done = tools.ran("site_pages", str(target))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return target


class _Page(HTMLParser):
    """Links, identifiers, and the text, of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = dict(attrs)
        self.ids |= {said.get("id") or ""}
        for name in ("href", "src"):
            if link := said.get(name):
                self.links.append(link)
                if tag in {"script", "img", "link"} and said.get("rel") not in {"canonical", "prev", "next"}:
                    self.loaded.append(link)


def words_of(page: Path) -> str:
    body = page.read_text().partition("<article")[2].partition("</article>")[0]
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", body)).split())


@pytest.mark.nightly
@pytest.mark.parametrize("question", QUESTIONS)
def test_the_page_that_a_stranger_opens_first_answers(built, question):
    way, *words = QUESTIONS[question]
    tab, name = way.split("/", 1)
    index = (built / "index.html").read_text()
    assert re.search(rf'class="md-tabs__link">\s*{tab}\s', index), tab
    labelled = re.findall(
        r'<a href="([^"]+)" class="md-nav__link[^"]*">\s*<span class="md-ellipsis">\s*([^<]+?)\s*<', index
    )
    place = (
        "index.html" if name == "What it is" else next(link for link, label in labelled if html.unescape(label) == name)
    )
    text = words_of(built / place)
    assert [word for word in words if word not in text] == []


@pytest.mark.nightly
def test_every_link_of_every_page_leads_somewhere_and_nothing_is_loaded_from_elsewhere(built):
    pages = {path: _Page(path.read_text()) for path in built.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 60
    wrong = []
    for path, page in pages.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            linked = (path.parent / target).resolve() if target else path
            if not linked.is_file() or (anchor and linked in pages and anchor not in pages[linked].ids):
                wrong.append(f"{path.relative_to(built)}: {link}")
        wrong += [link for link in page.loaded if re.match(r"(https?:)?//", link)]
    assert wrong == []


@pytest.mark.nightly
def test_the_search_finds_each_message_under_an_anchor(built):
    entries = json.loads((built / "search/search_index.json").read_text())["docs"]
    titles = {
        " ".join(html.unescape(re.sub(r"<[^>]+>", "", one["title"])).split())
        for one in entries
        if "troubleshooting.html#m-" in one["location"]
    }
    said = {message.text.replace("`", "") for message in found()[0]}
    assert len(said) > 800
    assert sorted(said - titles) == []


@pytest.fixture
def served(built) -> Iterator[str]:
    """The site on a server: browsers let no page of a file search."""
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, directory=str(built))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


@pytest.mark.nightly
def test_no_page_is_wider_than_its_window_or_complains(built, served, tmp_path):
    pages = sorted(str(path.relative_to(built)) for path in built.rglob("*.html"))
    with chromium.browser(tmp_path / "profile") as browser:
        for width, dark, shown in ((400, True, pages), (1280, False, pages[::8])):
            for page in shown:
                browser.open(served + page, width=width, dark=dark)
                wide = browser.value("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
                assert wide[0] <= wide[1], f"{page} at {width}"
                assert browser.complaints() == [], page
                assert [url for url in browser.requests() if not url.startswith((served, "data:"))] == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("typed", "leads_to"), [
        ("the mount does not answer within 5 s", "operate/troubleshooting.html#m-the-mount-does-not-answer"),
        ("is there already; name another file for the bundle", "operate/troubleshooting.html#m-is-there-already-name-another"),
        ("STEPFS_LOG_DIR", "reference/variables.html"), ("stepfs_data_hedges_won_total", "reference/metrics.html"),
        ("sequence_length", "reference/plan-keys.html"),
    ],
)  # fmt: skip
def test_who_types_it_finds_it(served, tmp_path, typed, leads_to):
    first = "[...document.querySelectorAll('.md-search-result__link')].slice(0, 5).map(one => one.href)"
    with chromium.browser(tmp_path / "profile") as browser:
        browser.open(f"{served}index.html?q={quote(typed)}", width=1280)
        found: list[str] = []

        def answered() -> bool:
            found[:] = browser.value(first) or []
            return bool(found)

        until(answered, lambda: f"no result for {typed}", within_s=60)
    assert any(leads_to in re.sub(r"\?[^#]*", "", link) for link in found), found


@pytest.mark.nightly
def test_a_directory_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("kept")
    done = tools.ran("site_pages", str(tmp_path))
    assert (done.returncode, done.stderr.count("\n"), "name an empty directory" in done.stderr) == (4, 1, True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    done = tools.ran("site_pages", "/proc/site")
    assert (done.returncode, done.stderr.count("\n"), "can be written" in done.stderr) == (1, 1, True)


def test_the_reference_has_every_public_name():
    known = face.face()
    commands = {name: reference.commands(name) for name in ("stepfs", "stepfs-produce")}
    missing = [
        f"{program} {command} {option}"
        for program, its in known["commands"].items()
        for command, said in its.items()
        for option in ("", *said["options"])
        if f"## {program} {command} " not in commands[program]
        or not all(word.replace("_", "&#95;") in commands[program] for word in option.split("/"))
    ]
    names = {
        name.removesuffix(end) for name, *_ in reference.metric_names() for end in ("", "_total", "_info", "_bucket")
    }
    missing += [name for name in known["metrics"] if name not in names]
    variables, csi = reference.variables().replace("&#95;", "_"), reference.csi_attributes()
    used = {
        name
        for home in ("fs", "producer")
        for path in (tools.ROOT / home).rglob("*.py")
        for name in re.findall(r"\bSTEPFS_[A-Z]\w+\b", path.read_text())
        if not re.search(r"SERVICE|PORT_|_$", name)
    }
    missing += [name for name in used if f"<code>{name}</code>" not in variables]
    missing += [name for name in known["csi_attributes"] if f"<code>{name}</code>" not in csi]
    keys = reference.plan_keys().replace("&#95;", "_")
    missing += [key for key in known["plan_keys"] if f"<code>{key.rpartition('.')[2]}</code>" not in keys]
    assert missing == []


@pytest.mark.parametrize(
    "words", [
        ["ls", "file:///nowhere/at/all"], ["mount", "file:///nowhere/at/all", "/nowhere"], ["ls", "ftp://host/lake"],
        ["status", "/nowhere"], ["help", "no", "such", "topic"], ["init", "file:///proc/lake", "--slices", "2"],
        ["fork", "file:///nowhere/at/all", "file:///nowhere/new", "--skip", "9:3"],
    ],
)  # fmt: skip
def test_what_a_command_says_is_on_the_page(words):
    done = stepfs(*words)
    assert done.code
    line = done.err.strip().removeprefix("stepfs: ")
    patterns = [re.escape(one.text).replace(re.escape(VALUE), ".*") for one in found()[0]]
    assert any(re.fullmatch(pattern, line) for pattern in patterns), line


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_the_script_refuses_a_wrong_call(words):
    done = subprocess.run([tools.ROOT / "scripts/site", *words], capture_output=True, text=True, check=False)
    assert (done.returncode, "usage: scripts/site OUT" in done.stderr) == (2, True)
