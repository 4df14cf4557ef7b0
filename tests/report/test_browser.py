"""report.html in Chromium: sorting, the filter, colour schemes, widths, accessible names, and no requests."""

import functools
import importlib.util
import os
import re
import shutil
from types import SimpleNamespace

import pytest

from ctxext.report import pictures as report_pictures
from ctxext.report import report as report_figures
from ctxext.report.page import render_page
from evaluation_fixtures import AS_PNG
from report_pages import MARKUP, REPORTS

pytestmark = pytest.mark.browser

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""Names of the browser. Debian's smallest is the first: it takes half of the processor time of the second."""
DPI = 160
everywhere = pytest.mark.parametrize("width", [400, 1280])
in_both_schemes = pytest.mark.parametrize("scheme", ["light", "dark"])
of_every_report = pytest.mark.parametrize("name", REPORTS)

# For each text on the page: its boxes, its font size, its contrast, and whether its cell contains it.
TEXTS = """() => {
  const channel = part => part <= 10 ? part / 3294.6 : ((part / 255 + 0.055) / 1.055) ** 2.4;
  const parts = colour => colour.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const contrast = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const paper = element => {
    for (; element; element = element.parentElement) {
      const colour = parts(getComputedStyle(element).backgroundColor);
      if (colour.length < 4 || colour[3]) return luminance(colour);
    }
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const range = document.createRange(), texts = [];
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement, text = node.data.trim();
    range.selectNodeContents(node);
    const boxes = [...range.getClientRects()].filter(box => box.width && box.height);
    if (!text || !boxes.length || !element.checkVisibility()) continue;
    const style = getComputedStyle(element), cell = element.closest("td, th")?.getBoundingClientRect();
    const fits = box => !cell || box.left >= cell.left - 1 && box.right <= cell.right + 1;
    texts.push({
      text, boxes: boxes.map(box => [box.left, box.top, box.right, box.bottom]), fits: boxes.every(fits),
      size: parseFloat(style.fontSize), contrast: contrast(luminance(parts(style.color)), paper(element)),
    });
  }
  const filter = document.getElementById("filter");
  const colour = filter && getComputedStyle(filter, "::placeholder").color;
  if (filter) texts.push({text: "placeholder", contrast: contrast(luminance(parts(colour)), paper(filter))});
  return texts;
}"""


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window. With CTXEXT_BROWSER, as `make browser` sets it, a test fails where there is none."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    missing = [] if program else ["Chromium (apt-get install chromium-headless-shell)"]
    missing += [] if importlib.util.find_spec("playwright") else ["playwright (pip install playwright)"]
    if missing:
        (pytest.fail if os.environ.get("CTXEXT_BROWSER") else pytest.skip)(f"not installed: {', '.join(missing)}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Write the page of a report, with its pictures; return its path and the report."""
    folder = tmp_path_factory.mktemp("pages")

    @functools.cache
    def write(name):
        report = REPORTS[name]()
        (folder / f"{name}.html").write_text(render_page(report))
        return folder / f"{name}.html", report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_pictures, "as_png", AS_PNG)
        patch.setattr(report_figures, "_DRAWS", 100)
        yield write


@pytest.fixture
def visit(browser, written):
    """Open the page of a report, with its details unfolded unless it is large; collects the requests and the errors."""
    contexts = []

    def open_page(name, *, width=1280, scheme="light"):
        path, report = written(name)
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        requests, errors = [], []
        context.route(re.compile("^(https?|wss?):"), lambda route: route.abort())
        context.on("request", lambda request: requests.append(request.url))
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text))
        page.goto(path.as_uri())
        if name != "large":  # Its counts are 5,280 rows, which look like those of the others.
            page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
        return SimpleNamespace(page=page, report=report, requests=requests, errors=errors, url=path.as_uri())

    yield open_page
    for context in contexts:
        context.close()


def natural(name):
    """Return a key that sorts x4 before x16."""
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in re.split(r"(\d+)", name.lower())]


def expected_keys(report):
    """Return the sort keys by model for each heading, computed from the report; None if unmeasured."""
    keys = {"model": {model["name"]: natural(model["name"]) for model in report["models"]}}
    for length in sorted({cell["length"] for cell in report["models"][0]["cells"]}):
        by_model = keys[f"{length // 1024}k tokens"] = {}
        for model in report["models"]:
            cells = [cell for cell in model["cells"] if cell["length"] == length]
            by_model[model["name"]] = round(sum(c["correct"] for c in cells) / sum(c["samples"] for c in cells), 6)
    for heading, key in (("effective length", "effective"), ("RULER ≥ 85.6\xa0% (1 of 13 tasks)", "ruler")):
        keys[heading] = {model["name"]: model[key]["length"] or 0 for model in report["models"]}
    costs = {model["name"]: (model["short"] or {}).get("against") for model in report["models"]}
    keys["cost, nats"] = {name: cost and cost["loss"] for name, cost in costs.items()}
    return keys


def rows_of(page):
    """Return the rows of the summary in their order, by model."""
    script = "rows => rows.map(row => [row.dataset.model, [...row.cells].map(cell => cell.textContent)])"
    return dict(page.locator("#summary tbody tr").evaluate_all(script))


def test_a_heading_sorts_by_its_column(visit):
    visited = visit("large")
    page, before, keys = visited.page, rows_of(visited.page), expected_keys(visited.report)
    headings = page.locator("#summary thead button")
    assert headings.all_inner_texts() == [*keys]
    for heading, by_model in keys.items():
        button = headings.filter(has_text=re.compile(f"^{re.escape(heading)}"))
        for press, falls in (("click", heading != "model"), ("Enter", heading == "model")):
            button.click() if press == "click" else button.press(press)
            after = rows_of(page)
            assert after == before, "each model has its own figures"
            order = [by_model[name] for name in after]
            measured = [key for key in order if key is not None]
            assert measured == sorted(measured, reverse=falls), heading
            assert order[: len(measured)] == measured, "what was not measured comes last"
            sorted_by = page.locator("#summary th[aria-sort]")
            assert sorted_by.get_attribute("aria-sort") == ("descending" if falls else "ascending")
            assert sorted_by.inner_text().startswith(heading)
            arrow = "head => getComputedStyle(head.querySelector('button'), '::after').content"
            assert ("▼" if falls else "▲") in sorted_by.evaluate(arrow)


@everywhere
def test_the_filter_hides_the_other_models_in_every_table(visit, width):
    visited = visit("large", width=width)
    page, names = visited.page, [model["name"] for model in visited.report["models"]]
    filter_box, count = page.get_by_role("searchbox"), page.locator("output")
    script = """tables => tables.map(table => {
      const rows = [...table.querySelectorAll("tr[data-model]")], name = row => row.dataset.model;
      return [[...new Set(rows.map(name))], [...new Set(rows.filter(row => row.getClientRects().length).map(name))]];
    })"""
    for words in ("YARN x8 ", "another-organisation", "dynamic", "no such model", ""):
        filter_box.fill(words)
        chosen = {name for name in names if all(word in name.lower() for word in words.lower().split())}
        assert count.inner_text() == (f"{len(chosen)} of 30 models" if words else "")
        tables = page.locator("table:has(tr[data-model])").evaluate_all(script)
        assert len(tables) == 2 + 2 * (8 + 1) + 3, "summaries, maps and counts of two tasks, losses, models"
        for of_table, shown in tables:
            assert {*shown} == chosen & {*of_table}
            assert len(of_table) >= 29


@in_both_schemes
@everywhere
@of_every_report
def test_every_text_is_legible(visit, name, width, scheme):
    page = visit(name, width=width, scheme=scheme).page
    texts = page.evaluate(TEXTS)
    assert [text for text in texts if text["contrast"] < 4.5] == []
    red, green, blue = map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor")))
    assert min(red, green, blue) > 240 if scheme == "light" else max(red, green, blue) < 40
    on_page = [text for text in texts if "size" in text]
    assert [text for text in on_page if text["size"] < 10.5] == []
    assert [text for text in on_page if not text["fits"]] == []
    assert find_overlaps(on_page) == []


def find_overlaps(texts):
    """Return the pairs of texts that overlap by more than a pixel."""
    boxes = sorted((top, bottom, left, right, t["text"]) for t in texts for left, top, right, bottom in t["boxes"])
    pairs, near = [], []
    for box in boxes:
        near = [other for other in near if other[1] > box[0] + 1]
        beside = [other for other in near if min(box[3], other[3]) - max(box[2], other[2]) > 1]
        pairs += [(box[4], other[4]) for other in beside if min(box[1], other[1]) > box[0] + 1]
        near.append(box)
    return pairs


def test_a_picture_of_losses_for_each_width_and_scheme(visit):
    sources = set()
    for width in (400, 1280):
        for scheme in ("light", "dark"):
            page = visit("large", width=width, scheme=scheme).page
            source, natural_width, shown, pixel, paper = page.locator("img").evaluate("""async image => {
              await image.decode();
              const canvas = document.createElement("canvas").getContext("2d");
              canvas.drawImage(image, 0, 0);
              const paper = getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number);
              return [image.currentSrc, image.naturalWidth, image.getBoundingClientRect().width,
                [...canvas.getImageData(2, 2, 1, 1).data].slice(0, 3), paper];
            }""")
            assert pixel == paper, "it has the background of the page"
            assert natural_width * 96 / DPI == pytest.approx(shown, rel=0.02), "its text is not scaled down"
            sources.add(source)
    assert len(sources) == 4


def test_a_page_of_many_models_is_short(visit):
    """Thirty models at eight lengths: the heat maps, 22,000 pixels, are folded."""
    page = visit("large").page
    assert page.evaluate("document.documentElement.scrollHeight") < 11_000
    maps = page.locator("details", has_text="Heat maps").first
    assert not maps.locator("table").first.is_visible()
    maps.locator("summary").click()
    assert maps.locator("table").first.is_visible()


@everywhere
@of_every_report
def test_the_page_does_not_scroll_sideways(visit, name, width):
    page = visit(name, width=width).page
    assert page.evaluate("document.scrollingElement.scrollWidth") == width
    # A table that is wider scrolls in its box, up to its last column, beside the names.
    boxes = page.locator(".wide").evaluate_all("""boxes => boxes.map(box => {
      box.scrollLeft = 1e6;
      const [edge, table] = [box.getBoundingClientRect().right, box.firstChild.getBoundingClientRect().right];
      return Math.abs(table - edge) < 1 || table < edge;
    })""")
    assert all(boxes)
    if page.locator("#summary").count():
        names = page.locator("#summary tbody th")
        assert names.evaluate_all("""heads => heads.every(head => {
          head.scrollIntoView({block: "center"});
          head.closest(".wide").scrollLeft = 1e6;
          const box = head.getBoundingClientRect();
          return box.left >= 0 && head.contains(document.elementFromPoint(box.left + 3, box.top + box.height / 2));
        })""")


@of_every_report
def test_every_control_and_picture_has_a_name(visit, name):
    page = visit(name).page
    nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    named = {"button", "searchbox", "textbox", "combobox", "checkbox", "link", "image", "img", "table"}
    named |= {"region", "DisclosureTriangle", "columnheader", "graphics-document"}
    found = [
        (node["role"]["value"], node.get("name", {}).get("value", "").strip())
        for node in nodes
        if not node["ignored"] and node["role"]["value"] in named
    ]
    assert [role for role, text in found if not text] == []
    roles = {role for role, _ in found}
    assert roles >= {"DisclosureTriangle", "table", "columnheader"}
    if name != "single":
        assert roles >= {"button", "searchbox", "image"}
    controls = [entry for entry in found if entry[0] in ("button", "DisclosureTriangle")]
    assert len({*controls}) == len(controls), "two controls have the same name"


@of_every_report
def test_no_request_leaves_the_page(visit, name):
    visited = visit(name)
    page = visited.page
    for button in page.get_by_role("button").all():
        button.click()
    if page.get_by_role("searchbox").count():
        page.get_by_role("searchbox").fill("a")
    page.emulate_media(color_scheme="dark", media="print")
    page.set_viewport_size({"width": 400, "height": 900})
    page.wait_for_load_state("networkidle")
    assert {url for url in visited.requests if not url.startswith("data:")} == {visited.url}
    assert visited.errors == []


def test_markup_in_a_name_stays_text(visit):
    visited = visit("markup")
    page, names = visited.page, [model["name"] for model in visited.report["models"]]
    assert [MARKUP in name for name in names] == [True, True, False]
    shown = page.locator("#summary tbody th").evaluate_all("heads => heads.map(head => head.dataset.value)")
    assert shown == names
    for selector in ("#summary tbody th", "table.map tbody th", "li", "td.text", "td"):
        assert any(MARKUP in text for text in page.locator(selector).all_inner_texts()), selector
    assert page.title() == "Long context: 3 models"
    assert (page.locator("img").count(), page.locator("script").count()) == (1, 1)
    page.get_by_role("searchbox").fill("onerror <script>")
    rows = page.locator("#summary tbody tr:visible")
    assert rows.evaluate_all("rows => rows.map(row => row.dataset.model)") == names[1:2]


def test_each_curve_of_many_has_its_line(visit):
    page = visit("large").page
    lines = page.locator("svg line").evaluate_all(
        "lines => lines.map(line => line.getAttribute('stroke') + line.getAttribute('stroke-dasharray'))"
    )
    assert len({*lines}) == len(lines) == 30


def test_legends_are_those_of_the_columns(visit):
    """One model at one length has no effective length, no cost, nothing to sort or filter, and one sample."""
    page = visit("single").page
    text = page.locator("main").inner_text()
    assert "1 sample per cell" in text
    absent = ("effective length", "Bold", "Cost", "RULER", "*:", "sort", "Points are measured")
    assert [word for word in absent if word.lower() in text.lower()] == []
    assert page.locator("button, input").count() == 0
    text = visit("large").page.locator("main").inner_text()
    assert [
        word for word in ("Effective length:", "Cost:", "RULER ≥", "*:", "sort", "Points") if word not in text
    ] == []


def test_the_verdict_is_above_the_tables(visit):
    page = visit("comparison").page
    verdict = page.get_by_text("Use yarn: it answers")
    assert verdict.bounding_box()["y"] < page.locator("table").first.bounding_box()["y"]
    assert verdict.bounding_box()["y"] < 450, "it is on the first screen"
