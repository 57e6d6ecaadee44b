"""docs/guides/notebook.ipynb in a real kernel, and a training that is interrupted in a cell.

  python tests/notebook.py [--whole]

Installs nbclient and ipykernel into a folder of their own inside the environment. Executes the
notebook, with an eighth of its steps or, with --whole, as it stands; then trains in a cell,
interrupts the kernel as its stop button does, and trains again in the same kernel. Exits with 0 if
the notebook has its picture and numbers, and the interrupted run goes on from where it stopped.
"""

import os
import re
import sys
import tempfile
import time
from pathlib import Path

import packages

NOTEBOOK = packages.ROOT / "docs" / "guides" / "notebook.ipynb"
PACKAGES = ("nbclient==0.11.0", "ipykernel==7.1.0")
WHOLE, SHORT = 800, 100  # steps of the notebook
FILLED = re.compile(r"0\.\d\d  Return a ?\S+ of the object\.")
LAST = 4000  # step, far more than run before the interrupt
SETUP = f"""
import electra_jax
config = electra_jax.load_config("quickstart", {{
  "data.dir": "runs/notebook/data", "model.num_layers": 1, "objective.name": "bert",
  "objective.temperature_schedule": "", "optimizer.separate_optimizers": False,
  "optimizer.generator_learning_rate": None, "train.steps": {LAST}, "eval.every_steps": 0,
  "eval.max_examples": 64, "log.every_steps": 5,
}})
def train():
  trained = electra_jax.train(config, "runs/stopped")
  print("step", trained.step, "finished", trained.finished)
"""


def text_of(cell) -> str:
  """Returns what a cell printed and showed as text."""
  return "".join(x.get("text") or x.get("data", {}).get("text/plain", "") for x in cell.outputs)


def check_notebook(nbformat, nbclient, folder: Path) -> None:
  """Executes the notebook in a folder."""
  steps, field = WHOLE if "--whole" in sys.argv else SHORT, '"train.steps": {}'.format
  notebook = nbformat.read(NOTEBOOK, as_version=4)
  (cell,) = (cell for cell in notebook.cells if field(WHOLE) in cell.source)
  cell.source = cell.source.replace(field(WHOLE), field(steps))
  assert not any(cell.get("outputs") for cell in notebook.cells), "clear the outputs"
  nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": folder}}).execute()
  cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
  shown = "\n".join(map(text_of, cells))
  assert "finished=True" in shown and f"heldout step {steps}/{steps}" in shown, shown[-3000:]
  assert "<Encoder runs/notebook/run: 2 layers of 128, 2,048 tokens" in shown, shown[-3000:]
  images = [o for cell in cells for o in cell.outputs if "image/png" in o.get("data", {})]
  assert len(images) == 1, f"{len(images)} pictures"
  filled = text_of(cells[-1]).splitlines()
  # A filled-in piece of a word joins the word before it.
  assert len(filled) == 5 and all(FILLED.fullmatch(line.rstrip()) for line in filled), filled
  print(text_of(cells[-1]))


def check_interrupt(manager, folder: Path) -> None:
  """Interrupts a training in a cell, and goes on."""
  kernel, client = manager.start_new_kernel(kernel_name="python3", cwd=str(folder))
  try:

    def run(code: str, until: str = "") -> str:
      """Executes code; interrupts it, once, where its output has `until`."""
      found, interrupted = [], False

      def keep(message) -> None:
        nonlocal interrupted
        found.append(message["content"].get("text", ""))
        if until and not interrupted and until in "".join(found):
          interrupted = True
          kernel.interrupt_kernel()

      reply = client.execute_interactive(code, timeout=600, output_hook=keep)
      assert reply["content"]["status"] == "ok", f"{reply['content']}\n{''.join(found)[-3000:]}"
      return "".join(found)

    run(SETUP)
    first = run("train()", until=f"train step 5/{LAST} ")
    assert "SIGINT: stopping after this step" in first and "finished False" in first, first[-2000:]
    assert "resume by training in the same workdir again" in first, first[-2000:]
    step = int(first.rpartition("step ")[2].split()[0])
    assert 5 <= step < LAST
    again = run("train()", until=f"train step {step // 5 * 5 + 10}/{LAST} ")
    assert f"resuming from step {step}" in again, again[:3000]
    assert run("print(1 + 1)") == "2\n"
    print(f"interrupted after step {step}, and went on")
  finally:
    client.stop_channels()
    kernel.shutdown_kernel(now=True)


def main() -> None:
  installed = packages.install("notebook", *PACKAGES, *packages.constraint())
  sys.path.append(str(installed))
  os.environ["PYTHONPATH"] = os.pathsep.join([str(packages.ROOT), str(installed)])
  os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
  # As in conftest.py: compilation is most of it.
  os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
  )
  import nbclient
  import nbformat
  from jupyter_client import manager

  with tempfile.TemporaryDirectory() as made:
    for check, *modules in ((check_notebook, nbformat, nbclient), (check_interrupt, manager)):
      began = time.monotonic()
      check(*modules, Path(made))
      print(f"ok, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
  main()
