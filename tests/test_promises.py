"""The promises of docs/status.md, in this process; `tests/faults` keeps them in real runs."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from test_train import (  # noqa: F401 (two are fixtures)
  STEPS,
  assert_same_run,
  begun_run,
  copy_of_run,
  damage_newest,
  interrupt_at,
  lines,
  programs_of,
  saved,
)

from electra_jax.data import pretrain_batches
from electra_jax.monitor import metrics
from electra_jax.pretrain import loop, run, train
from electra_jax.runtime import checkpoint, parallel, processes


def steps_of(workdir: Path) -> list[int]:
  return checkpoint.steps_on_disk(workdir / "checkpoints")


def test_a_run_that_is_stopped_ends_with_143_and_a_finished_one_with_0(
  straight, begun, tiny_config, monkeypatch
):
  before = signal.getsignal(signal.SIGUSR2)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(processes, "initialize", lambda *args: None)  # JAX has been started here
    interrupt_at(monkeypatch, 10, lambda: signal.raise_signal(signal.SIGTERM))
    try:
      assert train.run(tiny_config, begun) == 143
      assert steps_of(begun)[-1] == 10
      assert train.run(tiny_config, begun) == 0
    finally:
      signal.signal(signal.SIGUSR2, before)
  assert saved(begun) == saved(straight)


@pytest.mark.parametrize("done", [0, 6, STEPS])
def test_a_stop_in_an_evaluation_saves_and_the_evaluation_is_done_where_the_run_goes_on(
  straight, tiny_config, tmp_path, monkeypatch, done
):
  def evaluate(eval_step, params, batches, step, stops):
    def interrupted():
      for batch in batches:
        if step == done:
          signal.raise_signal(signal.SIGTERM)
        yield batch

    return real(eval_step, params, interrupted(), step, stops)

  expected = lines(straight)
  of_lines = [(x["split"], x["step"]) for x in expected]
  real, before = metrics.evaluate, signal.getsignal(signal.SIGUSR2)
  monkeypatch.setattr(processes, "initialize", lambda *args: None)  # JAX has been started here
  try:
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(metrics, "evaluate", evaluate)
      for _ in range(2):  # and again where it is done first
        assert train.run(tiny_config, tmp_path) == 143
        assert steps_of(tmp_path)[-1:] == ([done] if done else [])
        assert lines(tmp_path) == expected[: of_lines.index(("heldout", done))]
    assert train.run(tiny_config, tmp_path) == 0
  finally:
    signal.signal(signal.SIGUSR2, before)
  assert_same_run(tmp_path, straight)


def test_with_fallback_a_damaged_newest_checkpoint_is_set_aside_for_the_one_before(
  straight, copy, tiny_config, capsys, monkeypatch
):
  inside, abandoned = [], []

  def run_on_all(action):
    inside.append(action)
    try:
      return action()
    finally:
      inside.pop()

  def abandon(self) -> bool:
    abandoned.append(bool(inside))
    return real(self)

  real = checkpoint.Checkpoints.abandon
  monkeypatch.setattr(processes, "run_on_all", run_on_all)
  monkeypatch.setattr(checkpoint.Checkpoints, "abandon", abandon)
  damage_newest(copy)
  tiny_config.checkpoint.fallback = True
  assert train.train(tiny_config, copy).step == STEPS
  assert abandoned == [True]  # where it fails on one process, the others do not wait
  output = capsys.readouterr().out
  assert "checkpoints/12 is damaged" in output and f"moved to {copy}/damaged/12" in output
  assert "resuming from step 8" in output
  assert [p.name for p in (copy / "damaged").iterdir()] == ["12"]
  assert_same_run(copy, straight)


def poison(monkeypatch, first: int, every: bool = False) -> None:
  """Has the step break on the batch of that number, from 0, or on all from it on."""
  make, real, left_out = run.make_train_fns, pretrain_batches.train_batches, []

  def batches(data, *, skipped=(), **kwargs):
    left_out[:] = skipped
    return real(data, skipped=skipped, **kwargs)

  def programs(*args):
    made = make(*args)

    def train_step(state, batch, horizon):
      number = pretrain_batches.batch_number(int(state.step), left_out)
      if number >= first if every else number == first:
        state = state.replace(params=jax.tree.map(lambda x: x * np.float32("nan"), state.params))
      return made.train_step(state, batch, horizon)

    train_step.lower = made.train_step.lower
    return made._replace(train_step=train_step)

  monkeypatch.setattr(run, "make_train_fns", programs)
  monkeypatch.setattr(pretrain_batches, "train_batches", batches)


def test_with_rollback_nan_leaves_the_batch_out_and_the_run_ends(
  straight, begun, tiny_config, monkeypatch, capsys
):
  poison(monkeypatch, 9)
  tiny_config.health.on_nan = "rollback"
  assert train.train(tiny_config, begun).step == STEPS
  output = capsys.readouterr().out
  assert "step 10: " in output and "rolling back to skip batch 9 (1 of at most" in output
  meta = json.loads((begun / "checkpoints" / "12" / "meta" / "metadata").read_text())
  assert meta["skipped"] == [9]
  assert meta["position"]["sequences"] == 8 * (STEPS + 1)  # one batch of 8 further
  ours, theirs = lines(begun), lines(straight)
  assert [(x["split"], x["step"]) for x in ours] == [(x["split"], x["step"]) for x in theirs]
  assert [x == y for x, y in zip(ours, theirs, strict=True)] == [True] * 5 + [False] * 2
  assert np.isfinite(ours[-1]["mlm_loss"])


def test_going_back_ends_after_as_many_times_as_allowed(begun, tiny_config, monkeypatch, capsys):
  poison(monkeypatch, 9, every=True)
  tiny_config.health.on_nan, tiny_config.health.max_rollbacks = "rollback", 2
  with pytest.raises(metrics.NotFiniteError, match="^step 10: "):
    train.train(tiny_config, begun)
  assert capsys.readouterr().out.count("rolling back to skip batch") == 2
  assert steps_of(begun) == [4, 8]


def fill_disk(monkeypatch, times: int) -> None:
  """Has the disk be full as often as that, when a checkpoint asks."""
  real, asked = shutil.disk_usage, []

  def disk_usage(path):
    asked.append(path)
    return real(path)._replace(free=0) if len(asked) <= times else real(path)

  monkeypatch.setattr(checkpoint.shutil, "disk_usage", disk_usage)


@pytest.mark.parametrize(("on_error", "times"), [("continue", 2), ("stop", 1), ("continue", 99)])
def test_a_full_disk_ends_a_run_unless_it_may_go_on_and_saves_at_last(
  straight, begun, tiny_config, monkeypatch, capsys, on_error, times
):
  fill_disk(monkeypatch, times)
  tiny_config.checkpoint.every_steps, tiny_config.checkpoint.on_error = 2, on_error
  if (on_error, times) == ("continue", 2):  # the save of step 10, and its second try
    assert train.train(tiny_config, begun).step == STEPS
    assert steps_of(begun)[-2:] == [8, 12]
    assert_same_run(begun, straight)
    assert "step 8 is intact; training continues" in capsys.readouterr().out
    return
  with pytest.raises(checkpoint.WriteError, match="no space .* the checkpoint of step 8 is intact"):
    train.train(tiny_config, begun)
  told = "training continues" in capsys.readouterr().out
  assert told == (on_error == "continue")  # over step 10, but not over the last
  assert steps_of(begun) == [4, 8]


@pytest.mark.parametrize("on_warning", ["warn", "stop"])
def test_a_warning_stops_the_run_with_on_warning_stop_and_what_is_done_is_saved(
  straight, begun, tiny_config, capsys, on_warning
):
  # Every AUC is within 0.5 of guessing, and that of step 9 is the third line of it.
  tiny_config.health.update(window=3, after_step=0, auc_margin=0.5, on_warning=on_warning)
  if on_warning == "warn":
    assert train.train(tiny_config, begun).step == STEPS
    assert saved(begun) == saved(straight)
    assert "warning: step 9: rtd_auc" in capsys.readouterr().out
  else:
    for _ in range(2):  # the same command does not go on either
      with pytest.raises(loop.UnhealthyError, match="by config.health.on_warning: step 9: rtd_auc"):
        train.train(tiny_config, begun)
      assert steps_of(begun) == [4, 8, 9] and lines(begun)[-1]["step"] == 9
    warned = capsys.readouterr().out
    tiny_config.health.on_warning = "warn"
    assert train.train(tiny_config, begun).step == STEPS
    assert_same_run(begun, straight)
    assert warned.count("warning: step 9: rtd_auc") == 1


@pytest.mark.long
def test_bfloat16_trains_float32_weights_near_as_float32_does(straight, tiny_config):
  tiny_config.model.dtype = "bfloat16"
  fns, shards = programs_of(tiny_config), pretrain_batches.Shards.open(tiny_config.data.dir)
  batches = pretrain_batches.train_batches(
    shards, seed=tiny_config.seed, batch_size=8, start_step=0
  )
  state = fns.init_state(parallel.replicate(fns.init_params()))
  window = metrics.Window()
  for done in range(1, 4):
    state, values = fns.train_step(state, parallel.shard(next(batches)))
    window.add(done, values)
  half, full = window.close(), lines(straight)[1]  # the means of the same three steps
  assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"float32"}
  assert half["loss"] != full["loss"]
  for name in ("loss", "mlm_loss", "rtd_loss"):
    # 8 bits of every state are 0.4 %, and the mean over hundreds of tokens is closer.
    assert half[name] == pytest.approx(full[name], rel=0.01), name
  assert half["grad_norm"] == pytest.approx(full["grad_norm"], rel=0.1)


def test_compiled_programs_are_kept_in_the_workdir_unless_another_place_is_named(tmp_path):
  before = jax.config.jax_compilation_cache_dir
  try:
    for named, kept in ((None, str(tmp_path / "compiled")), ("elsewhere", "elsewhere")):
      jax.config.update("jax_compilation_cache_dir", named)
      with train._compilation_cache(tmp_path):
        assert jax.config.jax_compilation_cache_dir == kept
      assert jax.config.jax_compilation_cache_dir == named
  finally:
    jax.config.update("jax_compilation_cache_dir", before)


def test_the_steps_that_are_asked_for_are_traced(begun, tiny_config, capsys):
  tiny_config.profile.steps = "10:11"
  assert train.train(tiny_config, begun).step == STEPS
  (trace,) = (begun / "profile").rglob("*.xplane.pb")
  assert trace.stat().st_size > 1000
  assert f"{begun / 'profile'}" in capsys.readouterr().out


FAULTS = """
import resource, statistics
from electra_jax.runtime import parallel
parallel.keep_freed_memory()
import jax, jax.numpy as jnp

@jax.jit
def step(x):
  y = jnp.tanh(x @ jnp.ones((64, 16384)))  # 128 MB, 32,768 pages
  return y @ jnp.ones((16384, 64)) / 16384

x, faults = jnp.ones((2048, 64)), []
for _ in range(41):
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  x = step(x).block_until_ready()
  faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(statistics.median(faults))
"""


@pytest.mark.long
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc's malloc")
def test_a_step_on_cpus_finds_the_memory_of_the_step_before():
  env = {**os.environ, "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"}
  run = subprocess.run(
    [sys.executable, "-c", FAULTS], env=env, capture_output=True, check=True, timeout=300
  )
  # Each has 32,768 where the temporary is mapped anew; some of the first map what is then kept.
  assert float(run.stdout) < 3_000
