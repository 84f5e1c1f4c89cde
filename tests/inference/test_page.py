"""The page in a real browser: asking, cards, the drawing, teaching; axe finds no barrier."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rankup
from helpers.serving import GREY, Server, add_task, guessing, image, network, serving
from inference.test_learning import photos
from inference.test_uploads import zipped

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("there is no Chromium to show the page in", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")

expect = sync_api.expect
expect.set_options(timeout=20_000)

OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
OFFLINE = ["--disable-background-networking", "--disable-component-update", "--no-first-run"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page") / "net"
    net = network(3, 2)
    net.inputs = GREY
    rankup.save(net, folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder, "--allow-learning") as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*OPTIONS, *OFFLINE])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    """The page once it shows its tasks. Nothing may go wrong in it, nor be asked of elsewhere."""
    with opened(browser, server) as page:
        yield page


class opened:
    def __init__(self, browser: Any, server: Server, **options: Any) -> None:
        self.context, self.url = browser.new_context(**options), server.url
        self.wrong: list[str] = []

    def __enter__(self) -> Any:
        page = self.context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("request", lambda request: self._elsewhere(request.url))
        page.goto(self.url)
        page.wait_for_selector(".card .dot")
        return page

    def _elsewhere(self, url: str) -> None:
        if not url.startswith((self.url, "blob:")):
            self.wrong.append(url)

    def __exit__(self, *_: object) -> None:
        self.context.close()
        assert not self.wrong


def upload(name: str, content: bytes, kind: str = "image/png") -> dict[str, Any]:
    return {"name": name, "mimeType": kind, "buffer": content}


def test_images_are_answered_for_all_tasks_or_one(page: Any) -> None:
    page.set_input_files("#files", [upload("a.png", image(1)), upload("b.png", image(2))])
    page.wait_for_selector(".answer .classes")
    assert page.locator(".answer").count() == 2
    assert page.locator(".answer").first.locator("h3").all_inner_texts() == ["task 1", "task 2"]
    assert page.locator(".answer").first.locator(".what").inner_text() == "a.png"
    page.select_option("#task", "task 2")
    page.set_input_files("#files", [upload("c.png", image(3))])
    expect(page.locator(".answer")).to_have_count(1)
    assert page.locator(".classes li").count() == 2
    shares = [float(text.split()[0]) for text in page.locator(".share").all_inner_texts()]
    assert sum(shares) == pytest.approx(100, abs=0.2)


def test_task_is_guessed_unless_chosen(browser: Any, tmp_path: Path) -> None:
    with serving(guessing(tmp_path / "net")) as server, opened(browser, server) as page:
        page.set_input_files("#files", [upload("a.png", image(1))])
        page.wait_for_selector(".answer .classes")
        assert page.locator(".answer h3").count() == 1
        expect(page.locator(".answer")).to_contain_text("sure")
        page.select_option("#task", label="All tasks")
        page.set_input_files("#files", [upload("a.png", image(1))])
        expect(page.locator(".answer h3")).to_have_count(2)
        assert "sure" not in page.locator(".answer").inner_text()


def test_dropped_image_is_answered(page: Any) -> None:
    page.evaluate(
        """async (content) => {
            const data = new DataTransfer();
            data.items.add(new File([new Uint8Array(content)], "dropped.png"));
            document.getElementById("image-input").dispatchEvent(
                new DragEvent("drop", { dataTransfer: data, cancelable: true }));
        }""",
        list(image(1)),
    )
    page.wait_for_selector(".answer .classes")
    assert page.locator(".what").inner_text() == "dropped.png"


def test_bad_image_gives_the_servers_sentence(page: Any) -> None:
    page.set_input_files("#files", [upload("a.png", b"no image")])
    expect(page.locator("#ask-error")).to_contain_text("broken or in an unknown format")


def test_cards_and_drawing_show_the_tasks(page: Any) -> None:
    assert page.locator(".card h3").all_inner_texts() == ["task 2", "task 1"]
    assert "Selects from task 1" in page.locator(".card").first.inner_text()
    assert page.locator("#drawing svg text").count() == 3  # two tasks and a heading
    assert page.locator("#drawing svg path").count() == 1
    page.click("summary")
    assert page.locator("#sharing-table tbody tr").count() == 2


def test_task_is_taught_and_then_asked(page: Any) -> None:
    page.fill("#name", "light")
    page.fill("#epochs", "60")
    page.set_input_files("#zip", upload("a.zip", zipped(photos()).getvalue(), "application/zip"))
    page.click("#teach-form button")
    page.wait_for_selector(".lesson")
    expect(page.locator(".lesson")).to_contain_text("Learned", timeout=60_000)
    page.wait_for_selector(".lesson .curve")
    expect(page.locator(".card h3").first).to_have_text("light")
    page.select_option("#task", "light")
    page.set_input_files("#files", [upload("dark.png", photos()[-1][1])])
    page.wait_for_selector(".answer .classes")
    assert set(page.locator(".classes .name").all_inner_texts()) == {"bright", "dark"}


def test_refused_zip_gives_the_servers_sentence(page: Any) -> None:
    page.fill("#name", "more")
    page.set_input_files("#zip", upload("a.zip", b"no zip", "application/zip"))
    page.click("#teach-form button")
    expect(page.locator("#teach-error")).to_contain_text("The zip cannot be read")


def test_task_of_another_process_appears_by_itself(page: Any, folder: Path) -> None:
    before = page.locator(".card").count()
    other = rankup.load(folder)
    add_task(other, 2, "from elsewhere")
    rankup.save(other, folder)
    expect(page.locator(".card")).to_have_count(before + 1)
    assert page.locator(".card.new h3").inner_text() == "from elsewhere"


LOOKS = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"viewport": {"width": 360, "height": 740}, "color_scheme": "light"},
}


@pytest.mark.parametrize("look", LOOKS)
def test_axe_finds_nothing_and_nothing_overflows(browser: Any, server: Server, look: str) -> None:
    with opened(browser, server, **LOOKS[look]) as page:
        page.set_input_files("#files", [upload("a.png", image(1))])
        page.wait_for_selector(".answer .classes")
        page.click("summary")
        found = axe.Axe().run(page).response["violations"]
        assert [(each["id"], each["impact"], each["nodes"][0]["html"]) for each in found] == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.goto(f"{server.url}/docs")
        found = axe.Axe().run(page).response["violations"]
        assert [(each["id"], each["impact"], each["nodes"][0]["html"]) for each in found] == []
