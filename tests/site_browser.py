"""Opens every page of the documentation in a headless Chromium, from the disk and from a server.

  make docs && python tests/site_browser.py [--pictures=DIR]

Needs chromium and chromedriver, as tests/report_browser.py. At 1400 and 390 pixels: nothing in the
console but information, nothing from the network, no wider than the window unless it scrolls. Light
and dark: the home page has that background. The search finds.
"""

import argparse
import functools
import http.server
import itertools
import sys
import threading
import time
from pathlib import Path

import packages
import report_browser

SITE = packages.ROOT / "build" / "site"
WIDE = """
const content = document.querySelector(".md-content");
const scrolls = e => e != content
  && (/auto|scroll/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
const right = e => e.getBoundingClientRect().left + Math.max(e.offsetWidth, e.scrollWidth);
return [...content.querySelectorAll("*")].filter(
  e => right(e) > document.documentElement.clientWidth + 1 && !scrolls(e)
).map(e => e.outerHTML.slice(0, 200));
"""
SOURCES = "return performance.getEntriesByType('resource').map(e => e.name)"
BACK = "return getComputedStyle(document.body).backgroundColor"


class Handler(http.server.SimpleHTTPRequestHandler):
  """Serves a folder and prints nothing."""

  def log_message(self, *args) -> None:
    pass


def show(driver, address: str, width: int, scheme: str) -> None:
  """Opens a page in a window of that width."""
  size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
  features = [{"name": "prefers-color-scheme", "value": scheme}]
  driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
  driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
  driver.get(address)


def check(driver, root: str, page: str, width: int) -> None:
  """Compares what a page shows and loads. Raises AssertionError."""
  show(driver, f"{root}/{page}", width, "light")
  assert not (wide := driver.execute_script(WIDE)), f"{page} at {width} pixels: {wide}"
  out = [name for name in driver.execute_script(SOURCES) if not name.startswith(root)]
  assert not out, f"{page} loads {out}"
  console = [x for x in driver.get_log("browser") if x["level"] not in ("INFO", "DEBUG")]
  assert not console, (page, console)


def search(driver, root: str) -> None:
  """Types a method's name. Raises AssertionError if its page is not found."""
  from selenium.webdriver.common.by import By

  show(driver, f"{root}/index.html", 1400, "light")
  driver.find_element(By.CSS_SELECTOR, ".md-search__input").send_keys("fill_mask")
  deadline = time.monotonic() + 30
  while not (found := driver.find_elements(By.CSS_SELECTOR, "a.md-search-result__link")):
    assert time.monotonic() < deadline, f"{root}: nothing is found"
    time.sleep(0.1)
  links = [link.get_attribute("href") for link in found]
  assert any("api/encoder.html" in link for link in links), links


def main() -> None:
  """Runs from the command line."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--pictures", type=Path, help="where to save the home page")
  args = parser.parse_args()
  sys.path.append(str(packages.install("selenium", *packages.constraint(), "selenium==4.51.0")))
  pages = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html") if path.stem != "404")
  handler = functools.partial(Handler, directory=SITE)
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  driver = report_browser.browser()
  try:
    for page, width in itertools.product(pages, report_browser.WIDTHS):
      check(driver, SITE.as_uri(), page, width)
    for root in (SITE.as_uri(), f"http://127.0.0.1:{server.server_port}"):
      check(driver, root, "index.html", 1400)
      search(driver, root)
    for width, scheme in itertools.product(report_browser.WIDTHS, report_browser.SCHEMES):
      show(driver, f"{SITE.as_uri()}/index.html", width, scheme)
      back = driver.execute_script(BACK)
      assert (back == "rgb(255, 255, 255)") == (scheme == "light"), back
      if args.pictures:
        args.pictures.mkdir(parents=True, exist_ok=True)
        driver.save_screenshot(str(args.pictures / f"{width}-{scheme}.png"))
  finally:
    driver.quit()
  print(f"{len(pages)} pages: as they should be")


if __name__ == "__main__":
  main()
