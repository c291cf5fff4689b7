"""The console in a real browser: what people see and do, with the keyboard, with a key, and without the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio
import torch
from browser import chromium
from live import LIMIT_S, Gate, Gateway, gateway_here, gateway_process, short_folder, until
from pilotflame.runtime.front.pages import console
from safetensors.torch import save_file

pytest.importorskip("playwright")
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, expect

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = "def handler(event):\n    return event"
HOSTILE = '</li><img src=x onerror="window.hurt=1"><script>window.hurt=2</script>\u202egnp.exe'
PRINTS = f"def handler(event):\n    print({HOSTILE!r})\n    raise ValueError({HOSTILE!r})"
WAITS = "import gate\nasync def handler(event):\n    await gate.wait_async()\n    return event"
FAILS = "def setup(context):\n    raise RuntimeError('the tokenizer is missing')\ndef handler(event):\n    return event"
Visit = Callable[..., Any]


@pytest.fixture(scope="module", autouse=True)
def _lines_come_sooner() -> Iterator[None]:
    """Send lines more often than once a second, so that these tests do not wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console, "EVERY_S", 0.25)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def visit(browser: Browser, gateway: Gateway) -> AsyncIterator[Visit]:
    """Yield a function: `await visit("#/usage", url=…, width=…)` opens the console. At the end, no page may have reported an error."""
    async with contextlib.AsyncExitStack() as stack:
        problems: list[str] = []

        async def open_page(
            place: str = "", *, url: str = "", width: int = 1280, scheme: Any = "light"
        ) -> Page:
            context = await browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
            stack.push_async_callback(context.close)
            page = await context.new_page()
            page.set_default_timeout(LIMIT_S * 1000)
            expect.set_options(timeout=LIMIT_S * 1000)
            own = url or gateway.url

            def asked(request: Any) -> None:
                if not request.url.startswith(own):
                    problems.append(f"a request to {request.url}")

            page.on("pageerror", lambda error: problems.append(f"{error} {error.stack}"))
            # The browser also reports violations of the security policy as such messages. Ignore failed loads: a refusal or a stopped
            # gateway is no error of the page.
            page.on(
                "console",
                lambda said: (
                    problems.append(said.text)
                    if said.type == "error" and "Failed to load resource" not in said.text
                    else None
                ),
            )
            page.on("request", asked)
            await page.goto(f"{own}/console{place}")
            return page

        yield open_page
    assert problems == []


async def test_without_functions_it_says_how_to_deploy_one(browser: Browser, visit: Visit, state: Any):
    async with gateway_here(state) as gateway:
        page = await visit(url=gateway.url)
        await expect(page.get_by_role("heading", name="No function is deployed")).to_be_visible()
        await expect(page.get_by_text("pilotflame deploy greeter")).to_be_visible()
        function = await gateway.deploy(ECHO, name="greeter")
        await expect(page.get_by_role("link", name="greeter")).to_be_visible()
        await expect(page.get_by_role("heading", name="No function is deployed")).to_be_hidden()
        await gateway.client.delete(f"/v1/functions/{function.name}")
        await expect(page.get_by_role("link", name="greeter")).to_have_count(0)
        # Close the page first. Otherwise the gateway waits for the page's stream before it ends.
        await page.close()


async def test_figures_and_charts_follow_what_happens(deploy, visit: Visit):
    function = await deploy(ECHO, {"scale.max": 3})
    await function.settled(ready=0)
    page = await visit()
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name=function.name, exact=True))
    await expect(row).to_contain_text("zygote")
    await expect(row).to_contain_text("0 / 3")
    for number in range(20):
        await function.answer(number)
    await expect(row).to_contain_text("ready")
    await expect(row).to_contain_text("1 / 3")
    bar = row.get_by_role("img", name="latest cold start")
    await expect(bar).to_have_attribute("aria-label", re.compile(r"restore .* ms"))
    await row.get_by_role("link").click()
    await expect(page.get_by_role("heading", level=1)).to_contain_text(function.name)
    await expect(page).to_have_title(f"{function.name} · pilotflame")
    # The focus moves to the content of the page that the link has opened.
    assert await page.evaluate("document.activeElement.id") == "main"
    chart = page.get_by_role("img", name="Requests per second")
    await expect(chart).to_have_attribute("aria-label", re.compile(r"all .*highest [1-9]"))
    answers = page.get_by_role("region", name="Answers by status")
    await expect(answers.get_by_role("row").nth(1)).to_contain_text("20")
    cold = page.get_by_role("table", name="Cold starts by phase")
    one = (await function.status())["latest_cold_starts"][-1]
    shown = await cold.get_by_role("row", name="cold start").inner_text()
    # Allow a tolerance, because the mean adds up phases that were rounded in another way.
    figures = [float(text.removesuffix(" ms")) for text in shown.split("\t") if text.endswith(" ms")]
    tolerance = 0.11 if one["cold_start_ms"] < 9.95 else 1.1
    assert figures == pytest.approx([one["cold_start_ms"]] * 2, abs=tolerance)
    # In the waterfall, a phase begins where the earlier phases have ended.
    restore = next(phase for phase in one["phases"] if phase["name"] == "restore")
    part = cold.get_by_role("img", name="restore:").locator("rect")
    begins = 100 * restore["start_ms"] / one["total_ms"]
    assert float((await part.get_attribute("x") or "").rstrip("%")) == pytest.approx(begins, abs=0.01)


async def test_charts_show_what_was_before_the_page_was_opened(deploy, visit: Visit):
    function = await deploy(ECHO, {"scale.max": 3})
    for number in range(20):
        await function.answer(number)
    page = await visit(f"#/functions/{function.name}")
    for name, words in (("Requests per second", r"all 0.*highest [1-9]"), ("Load", r"running 0, highest 1")):
        await expect(page.get_by_role("img", name=name)).to_have_attribute("aria-label", re.compile(words))


async def test_the_line_of_requests_is_whole_and_begins_before_the_page_and_a_restart(
    visit: Visit, state: Any
):
    async with gateway_here(state) as gateway:
        function = await gateway.deploy(ECHO, name="one")
        for number in range(20):
            await function.answer(number)
    async with gateway_here(state) as gateway:
        page = await visit("#/functions/one", url=gateway.url)
        chart = page.get_by_role("img", name="Requests per second")
        await expect(chart).to_have_attribute("aria-label", re.compile(r"all 0.*highest [1-9]"))
        line = chart.locator("path.line").first
        # The path has only one M, so the line has no gap where the page was opened. The line ends at the right edge.
        await expect(line).to_have_attribute("d", re.compile(r"^M[^M]+$"))
        drawn = await line.get_attribute("d") or ""
        right = float((await chart.get_attribute("width")) or 0)
        assert float(drawn.rpartition("L")[2].split()[0]) == pytest.approx(right, abs=2)
        await page.close()


async def test_the_header_shows_a_step_down_and_none_up(deploy, gateway: Gateway, visit: Visit):
    function = await deploy(ECHO)
    view = (await gateway.client.get("/v1/console")).json()
    (row,) = [one for one in view["functions"] if one["name"] == function.name]
    page = await visit()

    async def send(route: Any) -> None:
        await route.fulfill(content_type="application/x-ndjson", body=json.dumps(view) + "\n")

    await page.route("**/v1/console?*", send)
    for rung, later, said in (("zygote", "ready", 0), ("ready", "zygote", 1)):
        row |= {"rung": rung, "next_rung": later, "next_rung_at": 1_900_000_000}
        await page.goto(f"{gateway.url}/console#/functions/{function.name}")
        await page.reload()
        header = page.get_by_role("heading", level=1)
        await expect(header.locator(".rung")).to_have_text(rung)
        assert (await header.inner_text()).count("if no request comes") == said


async def test_a_function_is_paused_and_resumed(deploy, visit: Visit):
    function = await deploy(ECHO)
    page = await visit(f"#/functions/{function.name}")
    await page.get_by_role("button", name="Pause…").click()
    await page.get_by_role("dialog").get_by_role("button", name="Pause").click()
    await expect(page.get_by_text("It refuses calls: paused.")).to_be_visible()
    await expect(page.get_by_role("button", name="Pause…")).to_be_hidden()
    assert (await function.error(1))["type"] == "function_paused"
    await page.get_by_role("link", name="Functions").click()
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name=function.name, exact=True))
    await expect(row).to_contain_text("paused")
    await row.get_by_role("link").click()
    await page.get_by_role("button", name="Resume").click()
    await expect(page.get_by_role("status").filter(has_text="accepts calls again")).to_be_visible()
    await expect(page.get_by_role("button", name="Pause…")).to_be_visible()
    assert await function.answer(1) == 1


GREETER = """
from typing import Literal
from pydantic import BaseModel, Field
class Greeting(BaseModel):
    name: str = Field(max_length=20, description="The name to greet.")
    times: int = Field(2, ge=1)
    tone: Literal["plain", "loud"] = "plain"
    tags: list[str] = []
def handler(event: Greeting):
    return {"said": event.model_dump()}
"""


async def test_a_function_is_called_by_a_form_of_its_schema(deploy, visit: Visit):
    function = await deploy(GREETER)
    page = await visit(f"#/functions/{function.name}/call")
    await page.get_by_label("name").fill("Ada")
    await page.get_by_label("tone").select_option("loud")
    await page.get_by_label("tags").fill('["a"]')
    await page.get_by_role("button", name="Send").click()
    answer = page.get_by_label("Answer")
    await expect(answer).to_contain_text('"tone": "loud"')
    said = json.loads(await answer.inner_text())["said"]
    assert said == {"name": "Ada", "times": 2, "tone": "loud", "tags": ["a"]}
    await expect(page.get_by_role("status").filter(has_text="200 ·")).to_be_visible()
    # A refusal is shown as an answer. A field that is not JSON is not sent.
    await page.get_by_label("name").fill("x" * 20)
    await page.get_by_label("tags").fill("[1]")
    await page.get_by_role("button", name="Send").click()
    await expect(answer).to_contain_text("tags[0]")
    await page.get_by_label("tags").fill("[")
    await page.get_by_role("button", name="Send").click()
    await expect(page.get_by_text("This is not JSON")).to_be_visible()


WRITES = f"""
import gate
from pilotflame import Delta, GenerationRequest

def handler(event: GenerationRequest):
    usage = {{"prompt_tokens": 9, "completion_tokens": 2}}
    if event.messages[-1]["content"] == "fail":
        raise ValueError("no")
    yield Delta(reasoning="Hm.")
    yield Delta(text=f"{{len(event.messages)}} {{event.temperature:g}} {{event.adapter}} ", tokens=[1])
    if event.messages[-1]["content"] == "wait":
        gate.wait()
    yield Delta(text={HOSTILE!r}, tokens=[2], finish_reason="stop", usage=usage)
"""


async def test_people_talk_to_a_language_model(deploy, visit: Visit, gate: Gate, tmp_path: Any):
    weights = tmp_path / "weights"
    weights.mkdir()
    save_file({"a": torch.zeros(2)}, weights / "model.safetensors")
    settings = {"snapshot": str(weights), "adapters.formal": str(weights)}
    function = await deploy(WRITES, settings, gate=gate)
    page = await visit(f"#/functions/{function.name}/call")
    messages = page.get_by_label("Messages")
    await page.get_by_text("Settings").click()
    await page.get_by_label("System").fill("Be brief.")
    await page.get_by_label("Temperature").fill("0.5")
    await page.get_by_label("Adapter").select_option("formal")
    await page.get_by_label("Message", exact=True).fill("Hello")
    await page.keyboard.press("Enter")
    await expect(messages).to_contain_text(f"2 0.5 formal {HOSTILE}")
    await expect(messages).to_contain_text("Hm.")
    await expect(
        page.get_by_role("status").filter(has_text=re.compile("first token after .* 2 tokens"))
    ).to_be_visible()
    # The model gets 4 messages, because the chat includes its first answer. A piece is shown before the next piece is made.
    await page.get_by_label("Message", exact=True).fill("wait")
    await page.get_by_role("button", name="Send").first.click()
    await expect(messages).to_contain_text("4 0.5 formal")
    await page.get_by_role("button", name="Stop").click()
    await expect(page.get_by_role("status").filter(has_text="Stopped.")).to_be_visible()
    (await gate.next()).go()
    await page.get_by_label("Message", exact=True).fill("fail")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("status").filter(has_text="ValueError")).to_be_visible()
    await page.get_by_role("button", name="New chat").click()
    await expect(messages.get_by_role("listitem")).to_have_count(0)
    report = await Axe().run(page)
    assert report.violations_count == 0, report.generate_report()


RUNPOD = (
    "import runpod\ndef handler(job):\n    return job['input']\nrunpod.serverless.start({'handler': handler})"
)
COG = "from cog import BasePredictor\nclass Predictor(BasePredictor):\n    def predict(self, text: str) -> str:\n        return text"


@pytest.mark.parametrize(
    ("source", "file", "path"), [(RUNPOD, "rp_handler.py", "/v2/{}/runsync"), (COG, "predict.py", "/cog/predictions?function={}")]
)  # fmt: skip
async def test_handlers_of_other_platforms_are_called_by_their_routes(
    source: str, file: str, path: str, deploy, visit: Visit
):
    function = await deploy(None, files={file: source})
    page = await visit(f"#/functions/{function.name}")
    await expect(page.get_by_label("How to call it")).to_contain_text(path.format(function.name))
    await expect(page.get_by_label("How to call it")).to_contain_text('"input":')
    await page.get_by_role("link", name="Call", exact=True).click()
    await page.get_by_role("button", name="Send").click()
    await expect(page.get_by_role("status").filter(has_text="200 ·")).to_be_visible()


async def test_the_pages_of_jobs_need_no_plugin(visit: Visit, state: Any):
    async with gateway_here(state, plugins=("cog",)) as gateway:
        function = await gateway.deploy(ECHO, name="jobs")
        base = f"/v1/functions/{function.name}"
        job = (await gateway.client.post(f"{base}/jobs?wait_s=60", json={"input": "mine"})).json()["id"]
        page = await visit(f"#/functions/{function.name}/jobs", url=gateway.url)
        await expect(page.get_by_text("1 completed")).to_be_visible()
        await page.get_by_role("link", name=job).click()
        await expect(page.get_by_label("Output")).to_contain_text('"mine"')
        await page.close()


async def test_a_job_has_a_page_with_its_output_and_its_lines(deploy, gateway: Gateway, visit: Visit):
    function = await deploy(
        "def handler(event, context):\n    context.log.info('seen %s', event)\n    return [event]"
    )
    await function.answer("other")
    job = (await gateway.client.post(f"/v2/{function.name}/runsync", json={"input": "mine"})).json()["id"]
    page = await visit(f"#/functions/{function.name}/jobs")
    await page.get_by_role("link", name=job).click()
    await expect(page.get_by_label("Output")).to_contain_text('"mine"')
    await expect(page.get_by_text("seen mine")).to_be_visible()
    await expect(page.get_by_text("seen other")).to_have_count(0)
    # A line of the function's log has a link to all lines of its request.
    await page.get_by_role("link", name="Log", exact=True).click()
    await page.locator("li", has_text="seen other").get_by_role("link").click()
    await expect(page.get_by_text("seen other")).to_be_visible()
    await expect(page.get_by_text("seen mine")).to_have_count(0)


async def test_money_has_three_digits(visit: Visit):
    page = await visit()
    values = "[0, 1e-10, 0.00659807, 1.6e-4, 1.234, 45.678, 1234.5]"
    found = await page.evaluate(
        f"import('/console/format.js').then(({{ money }}) => {values}.map((value) => money(value)))"
    )
    assert found == ["0", "<0.000001", "0.00660", "0.000160", "1.23", "45.68", "1235"]


@pytest.mark.parametrize("place", ["", "#/functions/{}", "#/functions/{}/call", "/docs"])
async def test_a_phone_shows_everything_without_scrolling_sideways(
    place: str, deploy, gateway: Gateway, visit: Visit
):
    function = await deploy(GREETER)
    page = await visit(place.format(function.name) if place != "/docs" else "", width=390)
    if place == "/docs":
        await page.goto(f"{gateway.url}/docs")
        await expect(page.locator("details").first).to_be_visible()
        await page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    else:
        for text in ("Errors/s", "p95") if not place.endswith("/call") else ("Call",):
            await expect(page.get_by_text(text, exact=True).first).to_be_visible()
    assert await page.evaluate("document.documentElement.scrollWidth") <= 390


async def test_hostile_output_is_shown_as_text(deploy, visit: Visit):
    function = await deploy(PRINTS)
    await function.error(1)
    page = await visit(f"#/functions/{function.name}/logs")
    line = page.locator(".lines li.info .text", has_text="onerror")
    await expect(line).to_have_text(HOSTILE)
    await expect(page.get_by_text("Following")).to_be_visible()
    # A line that comes later is shown without a reload.
    before = await page.locator(".lines li.error").count()
    await function.error(2)
    await expect(page.locator(".lines li.error")).to_have_count(before + 1)
    await page.get_by_role("link", name="Activity").click()
    await expect(page.locator(".errors li").first).to_contain_text("onerror")
    assert await page.evaluate("window.hurt") is None
    assert await page.locator("main img:not([alt='']), main script").count() == 0


async def test_the_log_can_be_filtered_and_paused(deploy, visit: Visit):
    function = await deploy(
        "def handler(event, context):\n    context.log.log(event['level'], event['text'])"
    )
    await function.answer({"level": 30, "text": "a warning"})
    await function.answer({"level": 20, "text": "some information"})
    page = await visit(f"#/functions/{function.name}/logs")
    await expect(page.get_by_text("some information")).to_be_visible()
    await page.get_by_label("Filter").fill("a warn")
    await expect(page.get_by_text("some information")).to_be_hidden()
    await expect(page.get_by_text("a warning")).to_be_visible()
    await page.get_by_label("Filter").fill("")
    await page.get_by_label("Level").select_option("warning")
    await expect(page.get_by_text("a warning")).to_be_visible()
    await expect(page.get_by_text("some information")).to_have_count(0)
    await page.get_by_role("button", name="Pause", exact=True).click()
    await function.answer({"level": 30, "text": "while paused"})
    await expect(page.get_by_text("1 new line")).to_be_visible()
    await expect(page.get_by_text("while paused")).to_have_count(0)
    await page.get_by_role("button", name="Pause", exact=True).click()
    await expect(page.get_by_text("while paused")).to_have_count(1)


async def test_decisions_are_listed_with_the_load_of_the_time(deploy, visit: Visit):
    function = await deploy(ECHO, {"scale.max": 2})
    await function.settled(ready=0)
    page = await visit(f"#/functions/{function.name}/decisions")
    await function.answer(1)
    row = page.get_by_role("row").filter(has_text="started 1 worker").first
    await expect(row).to_contain_text("load")
    chart = page.get_by_role("img", name="Workers and queue")
    await expect(chart).to_have_attribute("aria-label", re.compile(r"ready workers 1, highest 1; queued 0"))
    band = page.get_by_role("img", name="Rungs in the last 10 min")
    await expect(band).to_have_attribute("aria-label", re.compile(r"zygote|ready"))
    await page.get_by_role("button", name="Warm up").click()
    await expect(
        page.get_by_role("status").filter(has_text="was told to have a worker ready")
    ).to_be_visible()


async def test_usage_is_shown_of_all_functions_and_of_one(deploy, visit: Visit):
    function, other = await deploy(ECHO), await deploy(ECHO)
    for number in range(3):
        await function.answer(number)
    page = await visit("#/usage")
    rows = page.get_by_role("region", name="Usage").get_by_role("row")
    row = rows.filter(has=page.get_by_role("rowheader", name=function.name, exact=True))
    await expect(row).to_have_count(1)
    answered = 1 + (await rows.first.get_by_role("columnheader").all_inner_texts()).index("Invocations")
    await expect(row.locator(f":nth-child({answered})")).to_have_text("3")
    await expect(rows.filter(has_text=other.name)).to_have_count(1)
    await expect(row.get_by_role("img")).to_have_attribute("aria-label", re.compile(r"busy|idle|zygote"))
    await expect(page.get_by_text("Prices an hour in USD:")).to_be_visible()
    for width in (1280, 1001, 641, 390):
        await page.set_viewport_size({"width": width, "height": 800})
        region = page.get_by_role("region", name="Usage")
        assert await region.evaluate("one => one.scrollWidth <= one.clientWidth"), width
    await page.get_by_label("By").select_option("day")
    await expect(rows.first).to_contain_text("Day")
    await page.goto(page.url.replace("#/usage", f"#/functions/{function.name}/usage"))
    await expect(page.get_by_role("heading", name="Usage")).to_be_visible()
    await expect(rows.last.locator(f":nth-child({answered})")).to_have_text("3")


async def test_a_rollback_asks_first(deploy, gateway: Gateway, visit: Visit):
    function = await deploy(ECHO)
    first = (await function.status())["revision"]
    await gateway.deploy(ECHO + "  # newer", name=function.name)
    second = (await function.status())["revision"]
    page = await visit(f"#/functions/{function.name}/revisions")
    button = page.get_by_role("button", name=f"Roll back to {first}")
    await expect(page.get_by_role("button", name=f"Roll back to {second}")).to_be_hidden()
    await button.click()
    dialog = page.get_by_role("dialog", name=f"Roll {function.name} back to {first}?")
    await expect(dialog).to_be_visible()
    await expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    await page.keyboard.press("Escape")
    await expect(dialog).to_have_count(0)
    await expect(button).to_be_focused()
    assert (await function.status())["revision"] == second
    await button.click()
    await dialog.get_by_role("button", name="Roll back").click()
    await expect(dialog).to_have_count(0)
    await expect(page.get_by_role("status").filter(has_text=f"{function.name} runs {first}.")).to_be_visible()
    await expect(page.get_by_role("button", name=f"Roll back to {second}")).to_be_visible()
    assert (await function.status())["revision"] == first


async def test_a_refused_act_says_why(deploy, gateway: Gateway, visit: Visit):
    response = await gateway.send(FAILS, check=False)
    function = gateway.function(response.json()["name"])
    await function.error(1)
    page = await visit(f"#/functions/{function.name}")
    await expect(page.get_by_text("The log says why")).to_be_visible()
    await page.get_by_role("button", name="Restart…").click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_role("button", name="Restart").click()
    await expect(dialog.get_by_role("alert")).to_contain_text("the tokenizer is missing")
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("button", name="Reset…")).to_be_visible()
    await gateway.client.delete(f"/v1/functions/{function.name}")
    await expect(page.get_by_text(f"There is no function {function.name}")).to_be_visible()


async def test_a_failure_is_told_even_if_the_dialog_was_closed(deploy, visit: Visit, gate: Gate):
    source = (
        "import gate\ndef setup(context):\n    gate.wait()\n    raise RuntimeError('no tokenizer')\n" + ECHO
    )
    function = await deploy(source, check=False, gate=gate)
    page = await visit(f"#/functions/{function.name}")
    await page.get_by_role("button", name="Restart…").click()
    await page.get_by_role("dialog").get_by_role("button", name="Restart").click()
    await gate.next()
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("dialog")).to_have_count(0)
    gate.open()
    await expect(page.get_by_role("status").filter(has_text="no tokenizer")).to_be_visible()


async def test_times_are_rounded_before_they_are_cut_into_units(visit: Visit):
    page = await visit()
    times = "[59.4, 59.7, 119.7, 150, 3599.7, 7199, 5400, 86399, 129600]"
    found = await page.evaluate(f"import('/console/format.js').then(({{ span }}) => {times}.map(span))")
    assert found == [
        "59 s",
        "1 min",
        "2 min",
        "2 min 30 s",
        "1 h",
        "2 h",
        "1 h 30 min",
        "1.0 days",
        "1.5 days",
    ]


async def test_jobs_are_listed_and_can_be_cancelled(deploy, gateway: Gateway, visit: Visit, gate: Gate):
    function = await deploy(WAITS, {"concurrency": 1, "scale.max": 1}, gate=gate)
    page = await visit(f"#/functions/{function.name}/jobs")
    await expect(page.get_by_text("No jobs.")).to_be_visible()
    job = (await gateway.client.post(f"/v2/{function.name}/run", json={"input": 1})).json()["id"]
    await gate.next()
    row = page.get_by_role("row").filter(has_text=job)
    await expect(row).to_contain_text("IN_PROGRESS")
    await row.get_by_role("button", name="Cancel").click()
    await page.get_by_role("dialog").get_by_role("button", name="Cancel the job").click()
    await expect(row).to_contain_text("CANCELLED")
    await expect(row.get_by_role("button", name="Cancel")).to_be_hidden()
    status = (await gateway.client.get(f"/v2/{function.name}/status/{job}")).json()
    assert status["status"] == "CANCELLED"


async def test_a_key_is_asked_for_and_kept_in_the_tab_alone(visit: Visit, state: Any):
    async with gateway_here(state, auth="always") as gateway, gateway.at_home() as home:
        gateway.client = home
        for name in ("mine", "theirs"):
            await gateway.deploy(ECHO, name=name)
        order = {"name": "console", "scopes": ["read"], "functions": ["mine"]}
        key = (await home.post("/v1/keys", json=order)).json()
        page = await visit(url=gateway.url)
        field, go = page.get_by_label("Key", exact=True), page.get_by_role("button", name="Open")
        await expect(field).to_be_focused()
        await field.fill("pf_wrong")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert")).to_contain_text("unknown, was revoked, or has expired")
        await field.fill(key["key"])
        await go.click()
        await expect(page.get_by_role("link", name="mine")).to_be_visible()
        assert await page.get_by_role("link", name="theirs").count() == 0
        kept = "[localStorage.length, document.cookie, Object.values(sessionStorage).length]"
        assert await page.evaluate(kept) == [0, "", 1]
        # The page does not offer actions that the key does not allow.
        await page.get_by_role("link", name="mine").click()
        await expect(page.get_by_role("button", name="Restart…")).to_be_hidden()
        await page.get_by_role("link", name="Revisions").click()
        await expect(page.get_by_text("lacks the scope deploy")).to_be_visible()
        await page.reload()
        await expect(page.get_by_text("lacks the scope deploy")).to_be_visible()
        await page.get_by_role("button", name="Forget the key").click()
        await expect(field).to_be_visible()
        assert await page.evaluate("sessionStorage.length") == 0
        invoker = (await home.post("/v1/keys", json={"name": "i", "scopes": ["invoke"]})).json()
        await field.fill(invoker["key"])
        await go.click()
        await expect(page.get_by_role("alert")).to_contain_text("lacks the scope 'read'")
        await page.close()


async def test_it_comes_back_with_the_gateway(visit: Visit):
    with short_folder() as folder:
        async with gateway_process(folder / "state") as gateway:
            await gateway.deploy(ECHO, name="kept")
            page = await visit(url=gateway.url)
            await expect(page.get_by_role("link", name="kept")).to_be_visible()
            await expect(page.locator("#connection")).to_have_text("Live")
            assert gateway.process is not None
            gateway.process.kill()
            await gateway.process.wait()
            await expect(page.get_by_text("The gateway does not answer")).to_be_visible()
            await expect(page.get_by_role("link", name="kept")).to_be_visible()
        async with gateway_process(folder / "state", port=gateway.address[1]) as again:
            await expect(page.locator("#connection")).to_have_text("Live")
            await again.function("kept").answer(1)
            row = page.get_by_role("row").filter(has_text="kept")
            await expect(row).to_contain_text("ready")
            await page.close()


async def test_a_hidden_page_follows_nothing(deploy, visit: Visit):
    await deploy(ECHO)
    page = await visit()
    await expect(page.locator("#connection")).to_have_text("Live")
    hide = """(state) => {
        Object.defineProperty(document, "visibilityState", {value: state, configurable: true});
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    before = len(asyncio.all_tasks())
    await page.evaluate(hide, "hidden")
    await expect(page.locator("#connection")).to_have_text("Paused")

    async def ended() -> bool:
        return len(asyncio.all_tasks()) < before

    await until(ended, "the end of the stream of a hidden page")
    await page.evaluate(hide, "visible")
    await expect(page.locator("#connection")).to_have_text("Live")


async def test_everything_is_reached_and_done_with_the_keyboard(deploy, visit: Visit):
    function = await deploy(ECHO)
    page = await visit()
    await expect(page.get_by_role("link", name=function.name)).to_be_visible()
    focusable = "[...document.querySelectorAll('a[href], button, input, select, [tabindex=\"0\"]')].filter((one) => one.checkVisibility()).length"
    wanted, seen, outlines = await page.evaluate(focusable), [], []
    for _ in range(wanted):
        await page.keyboard.press("Tab")
        seen.append(await page.evaluate("document.activeElement.textContent || document.activeElement.id"))
        outlines.append(await page.evaluate("getComputedStyle(document.activeElement).outlineStyle"))
    assert len(seen) == len(set(seen)) == wanted, seen
    assert set(outlines) == {"solid"}
    assert seen[0] == "Skip to the content"
    # The keyboard sorts the table, and `aria-sort` tells screen readers the order.
    await page.get_by_role("button", name="Workers").focus()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("columnheader", name="Workers")).to_have_attribute(
        "aria-sort", "descending"
    )
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("columnheader", name="Workers")).to_have_attribute("aria-sort", "ascending")
    # The focus stays on the link while the figures change.
    link = page.get_by_role("link", name=function.name)
    await link.focus()
    await function.answer(1)
    await expect(page.get_by_role("row").filter(has=link)).to_contain_text("ready")
    await expect(link).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", level=1)).to_contain_text(function.name)
    await page.get_by_role("link", name="Revisions").focus()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="Revisions")).to_be_visible()
    await expect(page.get_by_role("link", name="Revisions")).to_be_focused()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
async def test_axe_finds_nothing(deploy, gateway: Gateway, visit: Visit, width: int, scheme: str):
    function = await deploy(PRINTS)
    await function.error(1)
    await gateway.client.post(f"/v2/{function.name}/runsync", json={"input": 1})
    page = await visit(width=width, scheme=scheme)
    await expect(page.get_by_role("link", name=function.name)).to_be_visible()
    for place in ("", "activity", "logs", "jobs", "decisions", "usage", "revisions"):
        if place:
            await page.goto(f"{gateway.url}/console#/functions/{function.name}/{place}")
            await expect(page.locator("nav.parts [aria-current]")).to_have_text(
                {"logs": "Log"}.get(place, place.capitalize())
            )
            await expect(page.get_by_text("Loading…")).to_have_count(0)
        found = await Axe().run(page)
        assert found.violations_count == 0, (place, found.generate_report())
        # The page itself does not scroll sideways. Only its tables and the log may.
        assert await page.evaluate("document.documentElement.scrollWidth") <= width, place
    await page.get_by_role("button", name="Restart…").click()
    found = await Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    await page.keyboard.press("Escape")
    # Check the other pages that the navigation lists.
    listed = page.locator("#places a:not([hidden])[href^='#/']")
    for place in await listed.evaluate_all("links => links.map(link => link.hash)"):
        await page.goto(f"{gateway.url}/console{place}")
        await expect(page.get_by_text("Loading…")).to_have_count(0)
        found = await Axe().run(page)
        assert found.violations_count == 0, (place, found.generate_report())


async def test_charts_have_names_before_they_have_figures(deploy, gateway: Gateway, visit: Visit):
    function = await deploy(ECHO)
    page = await visit()
    # Do not answer the request for figures, so the charts stay without figures.
    await page.route("**/load?*", lambda _route: None)
    await page.goto(f"{gateway.url}/console#/functions/{function.name}/decisions")
    await expect(page.locator("svg[role=img]").first).to_be_visible()
    found = await Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
