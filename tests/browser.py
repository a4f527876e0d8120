"""Drive Jupyter in a real browser as a reader does: open a notebook, run cells, drag, press; for tests and pictures."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import nbformat
from kernels import eventually
from playwright.sync_api import Browser, FrameLocator, Locator, Page, Playwright, sync_playwright

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"

# Chromium as package managers call it; playwright's own, where somebody has installed that, comes last.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = [
    "--no-sandbox",  # in a container one is often root, and Chromium refuses that otherwise
    "--disable-dev-shm-usage",  # containers have a small /dev/shm
    *("--disable-gpu", "--disable-quic", "--disable-sync", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update"),
]

# What Jupyter itself puts on the console as an error, with the reason why it is none of ours.
ALLOWED = (
    # Notebook 7.6 loads settings of a plugin of JupyterLab that it does not have, in every notebook
    ("Cannot read properties of undefined (reading 'schema')", "/static/notebook/"),
    # and asks for the file browser in a page that has none
    ("Command 'filebrowser:open-path' not registered", "/static/notebook/"),
)


class NoBrowser(Exception):
    """There is no Chromium on this machine."""


class Server:
    """A Jupyter server on loopback with JupyterLab and, if it is installed, Notebook 7; all its files are in `folder`.

    The notebooks are copies: nothing that a test does is written into the repository.
    """

    def __init__(self, folder: Path) -> None:
        self.notebooks, runtime, settings = folder / "notebooks", folder / "runtime", folder / "config"
        shutil.copytree(NOTEBOOKS, self.notebooks, ignore=shutil.ignore_patterns(".*", "images"))
        # without this a question about news covers the notebook
        news = settings / "lab/user-settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
        news.parent.mkdir(parents=True)
        news.write_text('{"fetchNews": "false"}')
        places = {
            "JUPYTER_CONFIG_DIR": settings,
            "JUPYTER_DATA_DIR": folder / "data",
            "JUPYTER_RUNTIME_DIR": runtime,
            "IPYTHONDIR": folder / "ipython",
        }
        # under pytest ipykernel would behave in a way of its own
        inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", "--ip=127.0.0.1"]
        command += [f"--ServerApp.root_dir={self.notebooks}", "--LabApp.expose_app_in_browser=True"]
        command += ["--JupyterNotebookApp.expose_app_in_browser=True"]
        self.log = folder / "server.log"
        with self.log.open("w") as log:
            environment = inherited | {name: str(place) for name, place in places.items()}
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
        try:
            self._address = eventually(lambda: self._find(runtime), 60)
        except BaseException:
            self.close()
            raise

    def _find(self, runtime: Path) -> dict[str, Any] | None:
        """What the server has written about itself, once it listens."""
        assert self._process.poll() is None, self.log.read_text()
        for file in runtime.glob("jpserver-*.json"):
            with contextlib.suppress(ValueError):  # half written
                return json.loads(file.read_text())  # type: ignore[no-any-return]
        return None

    def address(self, notebook: str, app: str = "lab") -> str:
        """Where a notebook opens, in JupyterLab ("lab") or in Notebook 7 ("notebook")."""
        path = "notebooks" if app == "notebook" else "lab/workspaces/test/tree"
        token = self._address["token"]
        return f"{self._address['url']}{path}/{quote(notebook)}?token={token}" + ("&reset" if app == "lab" else "")

    def code_cells(self, name: str) -> list[str]:
        """The code cells of one of the notebooks."""
        notebook = nbformat.read(self.notebooks / name, 4)
        return [cell.source for cell in notebook.cells if cell.cell_type == "code"]

    def replace(self, name: str, old: str, new: str) -> None:
        """Change one place in the copy of a notebook."""
        content = (self.notebooks / name).read_text()
        assert content.count(old) == 1, f"{old!r} is {content.count(old)} times in {name}"
        (self.notebooks / name).write_text(content.replace(old, new))

    def write(self, name: str, *cells: str) -> str:
        """Make a notebook with these code cells; gives its name."""
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(cell) for cell in cells],
            metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
        )
        nbformat.write(notebook, self.notebooks / name)
        return name

    def close(self) -> None:
        """End the server and, with it, its kernels."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Notebook:
    """A notebook that is open in a page. Whatever goes wrong in the browser is in `errors`."""

    def __init__(self, page: Page, errors: list[str]) -> None:
        self.page, self.errors = page, errors

    # --- cells

    def run_all(self) -> None:
        """Run > Run All Cells; returns when the last one has ended."""
        self.page.evaluate("() => jupyterapp.commands.execute('notebook:run-all-cells')")

    def run_cell(self, number: int) -> None:
        """Shift-Enter in one cell; returns when it has ended."""
        self.page.evaluate(
            """async (number) => {
                jupyterapp.shell.currentWidget.content.activeCellIndex = number;
                await jupyterapp.commands.execute('notebook:run-cell');
            }""",
            number,
        )

    def run_until(self, text: str) -> int:
        """Run the code cells from the top to the first one that has this text in it; gives its number."""
        for number, cell in enumerate(self.cells()):
            if cell["cell_type"] == "code":
                self.run_cell(number)
                if text in "".join(cell["source"]):
                    return number
        raise LookupError(f"no cell has {text!r} in it")

    def cells(self) -> list[dict[str, Any]]:
        """All cells with their outputs, as they would be saved now."""
        content = "jupyterapp.shell.currentWidget.content.model.toJSON()"
        return self.page.evaluate(f"() => {content}.cells")  # type: ignore[no-any-return]

    def failures(self) -> list[str]:
        """The errors among the outputs of all cells."""
        outputs = [output for cell in self.cells() for output in cell.get("outputs", ())]
        return [f"{output['ename']}: {output['evalue']}" for output in outputs if output["output_type"] == "error"]

    def output(self, number: int) -> Locator:
        """What is below a cell; brought into view, because a cell far away is not drawn at all."""
        self.page.evaluate(
            """async (number) => {
                const notebook = jupyterapp.shell.currentWidget.content;
                notebook.activeCellIndex = number;
                await notebook.scrollToItem(number, 'start');
            }""",
            number,
        )
        cell = self.page.locator(f".jp-Notebook .jp-Cell[data-windowed-list-index='{number}']")
        cell.locator(".jp-OutputArea-output").first.wait_for()
        return cell

    def ask(self, expression: str) -> Any:
        """The value of an expression in the kernel, without a cell; anything that JSON can say."""
        text = self.page.evaluate(
            """async (code) => {
                const kernel = jupyterapp.shell.currentWidget.sessionContext.session.kernel;
                const future = kernel.requestExecute({ code, store_history: false });
                let text = '';
                future.onIOPub = ({ content }) => { text += content.text ?? content.traceback?.join('\\n') ?? ''; };
                await future.done;
                return text;
            }""",
            f"import json as _json; print(_json.dumps({expression}))",
        )
        try:
            return json.loads(text)
        except ValueError:
            raise AssertionError(f"the kernel answered to {expression}:\n{text}") from None

    def use_theme(self, name: str) -> None:
        """Settings > Theme, "Light" or "Dark"."""
        change = "(theme) => jupyterapp.commands.execute('apputils:change-theme', { theme })"
        self.page.evaluate(change, f"JupyterLab {name}")
        self.page.locator(f"body[data-jp-theme-name='JupyterLab {name}']").wait_for(state="attached")

    # --- coming and going

    def save(self) -> None:
        """File > Save Notebook."""
        self.page.evaluate("() => jupyterapp.commands.execute('docmanager:save')")

    def reload(self) -> None:
        """Save the notebook and load the page anew; its kernel goes on."""
        self.save()
        self.page.reload()
        wait_for_kernel(self.page)

    @contextlib.contextmanager
    def away(self, way: str) -> Iterator[None]:
        """Save the notebook, close its "page" or its "tab" in JupyterLab, and open it again in the end."""
        self.save()
        address, path = self.page.url, self.page.evaluate("() => jupyterapp.shell.currentWidget.context.path")
        if way == "page":
            self.page.goto("about:blank")
            yield
            self.page.goto(address)
        else:
            self.page.evaluate("() => jupyterapp.commands.execute('application:close')")
            yield
            self.page.evaluate("(path) => jupyterapp.commands.execute('docmanager:open', { path })", path)
        wait_for_kernel(self.page)

    # --- controls

    def press(self, inside: Locator | FrameLocator, name: str) -> None:
        """Click the button with this name."""
        inside.get_by_role("button", name=name, exact=True).click()

    def choose(self, inside: Locator, option: str) -> None:
        """Select an option in the drop-down list that has it."""
        inside.locator("select", has_text=option).first.select_option(option)

    def slider(self, inside: Locator, name: str) -> Locator:
        """The handle of the slider with this label."""
        return inside.locator(".widget-slider", has_text=name).locator(".noUi-handle")

    def drag(self, inside: Locator, name: str, share: float) -> None:
        """Take the handle of a slider and move it, as a hand does, to this share of the way."""
        handle = self.slider(inside, name)
        handle.scroll_into_view_if_needed()
        grip = handle.bounding_box()
        track = inside.locator(".widget-slider", has_text=name).locator(".noUi-base").bounding_box()
        assert grip and track
        x, y = grip["x"] + grip["width"] / 2, grip["y"] + grip["height"] / 2
        goal = track["x"] + share * track["width"]
        self.page.mouse.move(x, y)
        self.page.mouse.down()
        for part in range(1, 11):
            self.page.mouse.move(x + (goal - x) * part / 10, y)
            time.sleep(0.025)
        self.page.mouse.up()


def wait_for_kernel(page: Page) -> None:
    """Until the notebook of a page is there and its kernel has nothing to do."""
    page.wait_for_selector("#jupyterlab-splash", state="detached")
    kernel = "jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel"
    page.wait_for_function(f"() => window.jupyterapp && {kernel}?.status === 'idle'", timeout=60_000)


class Chromium:
    """A browser that notes every error."""

    def __init__(self, browser: Browser, server: Server) -> None:
        self._browser, self._server = browser, server

    @contextlib.contextmanager
    def notebook(
        self, name: str, app: str = "lab", height: int = 1000, scale: float = 1, width: int = 1200
    ) -> Iterator[Notebook]:
        """Open a notebook with a kernel of its own, and end both; fails if the browser had an error to report."""
        with self.page(viewport={"width": width, "height": height}, device_scale_factor=scale) as (page, errors):
            page.goto(self._server.address(name, app))
            wait_for_kernel(page)
            try:
                yield Notebook(page, errors)
            finally:
                before = list(errors)
                page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.shutdown()")
                # a kernel that ends in the middle of a run may tear its last messages: ipykernel, when its own thread
                # for them has gone, lets every thread write into one socket
                page.wait_for_timeout(100)
                errors[:] = before + [error for error in errors[len(before) :] if "message validation" not in error]

    @contextlib.contextmanager
    def page(self, offline: bool = False, **options: Any) -> Iterator[tuple[Page, list[str]]]:
        """An empty page, and what its console and its scripts complain of; fails at the end if that is anything."""
        context = self._browser.new_context(**options)
        context.set_offline(offline)
        errors: list[str] = []

        def complain(text: str) -> None:
            if not any(words in text and place in text for words, place in ALLOWED):
                errors.append(text)

        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: complain(_tell(message)) if message.type == "error" else None)
        page.on("pageerror", lambda error: complain(f"{error.name}: {error.message}\n{error.stack}"))
        try:
            yield page, errors
            assert not errors, "the browser reports:\n" + "\n".join(errors)
        finally:
            context.close()


def _tell(message: Any) -> str:
    where = message.location
    return f"{message.text} ({where.get('url')}, line {where.get('lineNumber')})"


@contextlib.contextmanager
def open_browser(server: Server) -> Iterator[Chromium]:
    """Chromium without a window; `NoBrowser` where there is none."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_find_chromium(playwright), args=ARGUMENTS)
        try:
            yield Chromium(browser, server)
        finally:
            browser.close()


def _find_chromium(playwright: Playwright) -> str:
    own = playwright.chromium.executable_path
    found = next(filter(None, map(shutil.which, NAMES)), own if Path(own).exists() else None)
    if found is None:
        raise NoBrowser(
            "needs Chromium: on Debian and Ubuntu, apt install chromium; elsewhere, playwright install chromium"
        )
    return found
