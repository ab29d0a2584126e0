"""Links between the pages of the tree lead to files and headings that exist, and no section is left out of the site."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from site_pages.menu import menu
from site_pages.pages import Group, LinkError, Page, Site
from site_pages.prose import for_mkdocs, headings, links

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for folder in (".", ".github", ".github/ISSUE_TEMPLATE", "fs", "producer", "scripts/deploy/policies")
    for path in (ROOT / folder).glob("*.md")
)


def astray(page: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    wrong = []
    for target in links(page.read_text()):
        file, _, anchor = target.partition("#")
        if target.startswith("https://"):
            continue
        linked = page.parent / file if file else page
        if not linked.is_file() or (anchor and anchor not in {one.anchor for one in headings(linked.read_text())}):
            wrong.append(target)
    return wrong


def test_every_page_of_the_tree_is_looked_at() -> None:
    left_out = {".venv", ".git", ".pytest_cache", "dist"}
    found = set()
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in left_out]
        found |= {Path(folder, name) for name in names if name.endswith(".md")}
    assert found == {*PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert astray(page) == []


@pytest.mark.parametrize(
    ("text", "wrong"), [
        ("[a](gone.md)", ["gone.md"]), ("[a](#here)\n# Here", []), ("[a](#there)\n# Here", ["#there"]),
        ("`[a](code.md)`\n```\n[a](fence.md)\n# Not one\n```\n[b](#not-one)", ["#not-one"]),
        ("# `a`: b, c\n# `a`: b, c\n[x](#a-b-c-1) [x](#a-b-c-2)", ["#a-b-c-2"]), ("![x](p.png)", ["p.png"]),
    ],
)  # fmt: skip
def test_the_search_for_links_finds_what_it_is_for(tmp_path: Path, text: str, wrong: list[str]) -> None:
    (tmp_path / "page.md").write_text(text)
    assert astray(tmp_path / "page.md") == wrong


@pytest.mark.parametrize(
    ("text", "made"), [
        ("a:\n* b\n  * c\n  * d\n* e", "a:\n\n* b\n    * c\n    * d\n* e"), ("a\n| b |\n|---|", "a\n\n| b |\n|---|"),
        ("1. a\n   b\n    * c", "1. a\n   b\n    * c"), ("```\na\n* b\n  * c\n```", "```\na\n* b\n  * c\n```"),
    ],
)  # fmt: skip
def test_what_another_reader_of_markdown_needs_is_added(text: str, made: str) -> None:
    assert "\n".join(for_mkdocs(text.split("\n"))) == made


def test_the_menu_of_the_site_names_headings_that_exist_and_each_link_has_a_page() -> None:
    places = dict(Site(ROOT, menu()).texts(generated=False))
    assert len(places) > 60
    assert [place for place in places if place.startswith("/") or ".." in place] == []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "one.md").write_text(
        "# One\ntop [a](#first) [p](p.png)\n## First\nf [b](two.md#other)\n### Inner\ni\n## Second\ns\n"
    )
    (tmp_path / "two.md").write_text("# Two\n## Other\n[inner](one.md#inner) [ONE.md](one.md#second)\n")
    (tmp_path / "p.png").write_bytes(b"")
    return tmp_path


def test_a_page_is_cut_at_its_headings_and_links_lead_to_the_pages(tree: Path) -> None:
    inner = Page("cut/inner", "Inner", ("one.md#inner",))
    pages = (Page("index", "One", ("one.md#",)), Page("cut/first", "First", ("one.md#first",)), inner)
    site = Site(tree, [Group("Tab", pages, rest="one.md"), Group("Two", (Page("two", "Two", ("two.md",)),))])
    texts = {place: " ".join(text.split()) for place, text in site.texts()}
    assert texts["index"] == "# One { #one } top [a](cut/first.md#first) [p](pictures/p.png)"
    assert texts["cut/first"] == "# First { #first } f [b](../two.md#other)"
    assert texts["cut/inner"] == "# Inner { #inner } i"
    assert texts["two"] == "# Two { #two } ## Other { #other } [inner](cut/inner.md#inner) [Second](second.md#second)"
    assert texts["second"] == "# Second { #second } s", "a section that no page names is one by itself"
    assert len(site.navigation()) == 2


@pytest.mark.parametrize("link", ["three.md", "one.md#nothing", "other.png"])
def test_a_link_that_leads_nowhere_ends_the_building(tree: Path, link: str) -> None:
    (tree / "one.md").write_text("# One")
    (tree / "two.md").write_text(f"[x]({link})")
    members = (Page("one", "One", ("one.md",)), Page("two", "Two", ("two.md",)))
    with pytest.raises(LinkError, match=link.partition("#")[0]):
        dict(Site(tree, [Group("Tab", members)]).texts())
