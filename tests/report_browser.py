"""Opens a report in a headless Chromium and reads its numbers back.

  python tests/report_browser.py [--pictures=DIR]

Needs chromium and chromedriver (Debian: chromium, chromium-driver); installs Selenium into a folder
of its own inside the environment. The report is of two runs that tests/golden holds. At 1400 and
390 pixels, light and dark: nothing in the console but information, no wider than the window, the
numbers in the tables and in the curves those of metrics.jsonl, a value under the pointer.
"""

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import packages

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden" / "version_0_1"
WIDTHS, SCHEMES = (1400, 390), ("light", "dark")
CURVES = """
return Bokeh.documents.flatMap(d => [...d._all_models.values()])
  .filter(m => m.type == "ColumnDataSource" && m.name)
  .map(m => [m.name, ...["step", "value"].map(column => Array.from(m.get_column(column)))]);
"""
CELLS = """
return [...document.querySelectorAll("#evaluations tr")].map(
  row => [...row.children].map(cell => cell.innerText));
"""
CUT = """
return [...document.querySelectorAll("h1, h2, h3, p, li, summary")]
  .filter(e => e.scrollWidth > e.clientWidth).map(e => e.innerText);
"""
SHOWN = """
const deep = root => [...root.querySelectorAll("*")].flatMap(
  e => e.shadowRoot ? [e, ...deep(e.shadowRoot)] : [e]);
return deep(document).filter(e => e.classList.contains("bk-tooltip-row-value"))
  .map(e => e.innerText);
"""


def make_runs(folder: Path) -> list[Path]:
  """Returns two runs: the golden one, and it with its numbers shifted."""
  runs = []
  for name in ("first", "second"):
    shutil.copytree(GOLDEN / "run", folder / name)
    config = json.loads((folder / name / "config.json").read_text())
    config["data"]["dir"] = str(GOLDEN / "data")
    (folder / name / "config.json").write_text(json.dumps(config))
    runs.append(folder / name)
  text = f"optimizer.generator_learning_rate={'0123456789' * 9}"
  warning = {"time": 0.0, "event": "warning", "text": text}
  with open(runs[1] / "journal.jsonl", "a", encoding="utf-8") as file:
    file.write(json.dumps(warning) + "\n")
  lines = [line | {"mlm_loss": line["mlm_loss"] + 0.25} for line in read(runs[1])]
  (runs[1] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  return runs


def read(run: Path) -> list[dict]:
  """Returns the lines of a run."""
  return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def browser():
  """Returns a headless Chromium that keeps its console."""
  from selenium import webdriver
  from selenium.webdriver.chrome.service import Service

  found = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
  if missing := [name for name, path in found.items() if not path]:
    raise SystemExit(f"{missing[0]} is missing: apt-get install chromium chromium-driver")
  options = webdriver.ChromeOptions()
  for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
    options.add_argument(argument)
  options.binary_location = found["chromium"]
  options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
  return webdriver.Chrome(options=options, service=Service(found["chromedriver"]))


def curves(driver) -> dict[str, dict[int, float]]:
  """Returns the points of the curves, as Bokeh holds them."""
  found = driver.execute_script(CURVES)
  return {name: dict(zip(steps, values, strict=True)) for name, steps, values in found}


def check(driver, width: int, scheme: str, page: Path, runs: list[Path]) -> None:
  """Opens the page and compares. Raises AssertionError."""
  from selenium.webdriver import ActionChains
  from selenium.webdriver.common.by import By

  emulate = driver.execute_cdp_cmd
  size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
  features = [{"name": "prefers-color-scheme", "value": scheme}]
  emulate("Emulation.setEmulatedMedia", {"features": features})
  emulate("Emulation.setDeviceMetricsOverride", size)
  driver.get(page.as_uri())
  deadline = time.monotonic() + 60
  while not driver.execute_script("return window.Bokeh && Bokeh.documents.every(d => d.is_idle)"):
    assert time.monotonic() < deadline, "the curves are not drawn"
    time.sleep(0.1)

  wide = driver.execute_script("return document.documentElement.scrollWidth")
  assert wide == width, f"{wide} pixels wide in a window of {width}"
  assert not (cut := driver.execute_script(CUT)), f"cut off at {width} pixels: {cut}"
  back = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
  assert (back == "rgb(255, 255, 255)") == (scheme == "light"), back

  cells = {row[0]: row[1:] for row in driver.execute_script(CELLS)}
  for place, run in enumerate(runs):
    last = [line for line in read(run) if line["split"] == "heldout"][-1]
    assert cells["mlm loss"][place] == f"{last['mlm_loss']:.4f} nats", cells["mlm loss"]
    for split in ("train", "heldout"):
      lines = {x["step"]: x["mlm_loss"] for x in read(run) if x["split"] == split}
      assert curves(driver)[f"{run.name} {split} mlm_loss"] == lines, (run.name, split)

  plot = driver.find_element(By.CSS_SELECTOR, ".plot")
  driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
  box, values = plot.rect, []
  half = int(box["width"] / 2)
  for x, y in itertools.product(range(40 - half, half, 3), range(-90, 90, 12)):
    ActionChains(driver, duration=0).move_to_element_with_offset(plot, x, y).perform()
    if values := driver.execute_script(SHOWN):
      break
  assert values, "no value under the pointer"
  known = {f"{line['mlm_loss']:.4f}" for run in runs for line in read(run)}
  assert set(values) & known, (values, known)

  console = [x for x in driver.get_log("browser") if x["level"] not in ("INFO", "DEBUG")]
  assert not console, console


def main() -> None:
  """Runs from the command line."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--pictures", type=Path, help="where to save what was seen")
  args = parser.parse_args()
  sys.path.append(str(packages.install("selenium", *packages.constraint(), "selenium==4.51.0")))
  with tempfile.TemporaryDirectory() as folder:
    runs, page = make_runs(Path(folder)), Path(folder) / "report.html"
    command = [sys.executable, "-m", "electra_jax.report", *map(str, runs), f"--out={page}"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    driver = browser()
    try:
      for width, scheme in itertools.product(WIDTHS, SCHEMES):
        check(driver, width, scheme, page, runs)
        print(f"{width} pixels, {scheme}: as it should be", flush=True)
        if args.pictures:
          args.pictures.mkdir(parents=True, exist_ok=True)
          driver.save_screenshot(str(args.pictures / f"{width}-{scheme}.png"))
    finally:
      driver.quit()


if __name__ == "__main__":
  main()
