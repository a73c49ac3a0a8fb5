"""Pages as a browser shows them: on a telephone and on a wide screen, light and dark."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from commons.cli.main import main
from tests.helpers.jobs.run_logs import lines_of, make_steps, write_run, write_unlooked

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
pytestmark = [
    pytest.mark.extra("playwright"),
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium or google-chrome on the PATH"),
]
WIDTHS, SCHEMES = (380, 1600), ("light", "dark")

# Of every element that shows text of its own: the contrast of its colour to that of the nearest painted background.
CONTRASTS = """() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const parts = color => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = element => {
    for (let each = element; each; each = each.parentElement) {
      const color = parts(getComputedStyle(each).backgroundColor);
      if (color[3] === 255) return color;
    }
  };
  const found = [];
  for (const element of document.body.querySelectorAll('*')) {
    const words = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    if (!words || !element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    const drawn = element.closest('svg'), surface = behind(element);
    const text = parts(drawn ? style.fill : style.color);
    if (drawn && text.join() === surface.join()) continue;  // it lies on a mark, whose colour has a test of its own
    const [low, high] = [luminance(text), luminance(surface)].sort((a, b) => a - b);
    const scale = drawn ? Math.hypot(element.getScreenCTM().a, element.getScreenCTM().b) : 1;
    const size = parseFloat(style.fontSize) * scale;
    found.push([element.textContent.trim().slice(0, 40), (high + 0.05) / (low + 0.05), size]);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Of lengths with as much on it as there can be, and of a single number of ranks; of three runs, and of one."""
    folder = tmp_path_factory.mktemp("pages")
    many = ["--lengths", "lognormal:130:1.4:8192", "--ranks", "8", "64", "--steps", "16", "--peak-tflops", "989"]
    one = ["--lengths", "zipf:1.2:4096", "--ranks", "4", "--steps", "16"]
    for name, argv in (("many", many), ("one", one)):
        assert main(["simulate", *argv, "--link-gbps", "400", "--html", str(folder / f"{name}.html")]) == 0
    write_unlooked(folder / "as-loaded", make_steps(balances=False), [5] * 11)
    write_run(folder / "of-many-ranks", lines_of(make_steps(ranks=70, rows=4), [10] * 5))
    write_run(folder / "balanced-with-a-name-of-many-words", lines_of(make_steps(), [5] * 11))
    runs = [str(folder / name) for name in ("as-loaded", "of-many-ranks", "balanced-with-a-name-of-many-words")]
    for name, folders in (("runs", runs), ("run", runs[2:]), ("two", runs[::2])):
        assert main(["report", *folders, "--html", str(folder / f"{name}.html")]) == 0
    return folder


# Pages, and their pictures.
PICTURES = {"many": 4, "one": 4, "runs": 3, "run": 6}


@pytest.fixture(params=PICTURES)
def address(pages, request):
    return (pages / f"{request.param}.html").as_uri()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_fits_and_is_read(browser, address, tmp_path, width, scheme):
    said, asked = [], []
    with browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme) as context:
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert said == [] and [url for url in asked if not url.startswith("data:")] == [address]
        contrasts = page.evaluate(CONTRASTS)
        assert len(contrasts) > 100
        assert [each for each in contrasts if each[1] < 4.5] == []
        assert min(size for _, _, size in contrasts) >= 10  # CSS pixels, of pictures on a telephone
        pictures = page.locator("figure svg:visible")
        assert pictures.count() == PICTURES[Path(address).stem]
        for number in range(pictures.count()):
            box = pictures.nth(number).bounding_box()
            assert box["width"] > 300 and box["x"] >= 0 and box["x"] + box["width"] <= width
        page.screenshot(path=tmp_path / "page.png", full_page=True)
        assert (tmp_path / "page.png").stat().st_size > 50_000


def test_two_runs_stand_beside_each_other_on_a_telephone(browser, pages):
    with browser.new_context(viewport={"width": WIDTHS[0], "height": 900}) as context:
        page = context.new_page()
        page.goto((pages / "two.html").as_uri())
        widths = page.locator(".scroll").evaluate_all("all => all.map(each => [each.scrollWidth, each.clientWidth])")
        assert widths and all(needed <= there for needed, there in widths)


def test_a_page_prints_in_light_colours_whatever_the_screen_has(browser, address, tmp_path):
    with browser.new_context(viewport={"width": 1600, "height": 900}, color_scheme="dark") as context:
        page = context.new_page()
        page.goto(address)
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        page.pdf(path=tmp_path / "page.pdf", format="A4")
        assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
