"""The report of benchmarks/gpu.py, results/gpu.md: a table of speeds, a line for each step."""

from collections.abc import Callable

OURS = "electra_jax"
TITLES = (
  f"median round|{OURS}, ms a step|of the peak|peak memory, GB|PyTorch, ms a step|of the peak"
  "|its time over ours"
).split("|")


def markdown(content: dict) -> str:
  """Returns the report of the content of gpu.json; steps without results are left out."""
  done = {name: r["result"] for name, r in content["steps"].items() if r["result"]}
  speeds = {k.partition(" ")[2]: x for k, x in done.items() if k.startswith("speed ")}
  types = sorted({x["dtype"] for x in speeds.values()})
  lines = [
    "# What `make gpu` measured",
    "",
    f"{', '.join([content['device'], *types])}, in {content['minutes']:.0f} minutes"
    " ([JSON](gpu.json)). PyTorch is transformers under torch.compile, with"
    " PyTorch's fused attention:",
    "",
  ]
  if speeds:
    rows = [TITLES, ["---"] + ["---:"] * (len(TITLES) - 1), *map(_speed, speeds, speeds.values())]
    lines += [*(f"| {' | '.join(row)} |" for row in rows), ""]
  lines += [
    f"- {line(done[name])}." for kind, line in LINES.items() for name in done if _is(name, kind)
  ]
  lines += [f"- Could not: {line}." for line in content["could_not"]]
  for kind in ("wrong", "failed", "left"):
    lines += [f"- {kind.capitalize()}: {line}." for line in content[kind]]
  if "pretraining" in done:
    lines += ["", "![curves of ELECTRA-Small on a GPU](gpu.png)"]
  return "\n".join(lines) + "\n"


def _is(name: str, kind: str) -> bool:
  return name == kind or name.startswith(f"{kind} ")


def _speed(name: str, found: dict) -> list[str]:
  results = found["results"]
  work = results[OURS]["secs_per_step"] * results[OURS]["share_of_matmul_peak"]
  cells = [f"{name.rpartition(' ')[0]}, {found['batch']} x {found['length']}"]
  for who in (OURS, *(who for who in results if who != OURS)):
    secs = results[who]["secs_per_step_median"]
    cells += [f"{1000 * secs:.1f}", f"{100 * work / secs:.1f} %"]
    if who == OURS:
      cells.append(f"{results[who].get('peak_memory_gb', 0):.1f}")
    else:
      cells.append(f"{results[who]['our_speed_over_it_median_of_rounds']:.2f}")
  return cells + ["-"] * (len(TITLES) - len(cells))


def _device(found: dict) -> str:
  product, peak = (found[k] / 1e12 for k in ("product_flops_per_sec", "matmul_peak_flops"))
  return (
    f"Products of random bfloat16 matrices reach {product:.0f} TFLOP/s (peak: {peak:.0f},"
    f" {found['matmul_peak_source']}), copies {found['copy_bytes_per_sec'] / 1e12:.2f} TB/s"
  )


def _numerics(found: dict) -> str:
  checks = found["checks"]
  known = [c for c in checks if c["error"] is not None]
  text = f"{sum(c['holds'] for c in checks)} of {len(checks)} comparisons with float32 hold"
  if not known:
    return text
  worst = max(known, key=lambda c: c["error"] / c["tolerance"])
  error, tolerance = (f"{worst[k]:.1e}" for k in ("error", "tolerance"))
  return f"{text}; nearest to its tolerance: {worst['what']}, {error} of {tolerance}"


def _resume(found: dict) -> str:
  bits = {
    name: "ends in the same bits"
    if run["same_bits"]
    else f"ends {run['relative_difference_of_the_state']:.1e} apart"
    for name, run in found["runs"].items()
  }
  text = f"A run killed after step {found['runs']['default']['killed_after']} {bits['default']}"
  if "deterministic" in bits:
    text += f"; with XLA's deterministic operations it {bits['deterministic']}"
  return text


def _memory(found: dict) -> str:
  real, here, described = (
    f"{found[k] / 2**30:.2f} GiB" if k in found else "unknown"
    for k in ("real", "here", "described")
  )
  return (
    f"Peak memory of {found['sizes']}: {real}; the preflight says {here} on the machine and"
    f" {described} without one"
  )


def _input(found: dict) -> str:
  rate = found["sequences_per_sec"][OURS]
  return f"The input pipeline gives {rate:,} sequences of {found['seq_length']} tokens a second"


def _finetuning(found: dict) -> str:
  ratios = [
    f"{who}: {values['our_speed_over_it'][OURS]['median_of_turns']:.2f}"
    for who, values in found["results"].items()
    if "our_speed_over_it" in values
  ]
  rate = found["results"][OURS]["examples_per_sec"]
  peers = f"; its speed over {'; '.join(ratios)}" if ratios else ""
  return f"Fine-tuning ELECTRA-Small ({found['pairs']}): {rate:,.0f} examples a second{peers}"


def _pretraining(found: dict) -> str:
  first, last = found["curve"][0], found["curve"][-1]
  return (
    f"ELECTRA-Small after {found['steps']:,} steps: held-out masked-LM loss"
    f" {first['mlm_loss']:.2f} to {last['mlm_loss']:.2f} nats, AUC {first['rtd_auc']:.3f} to"
    f" {last['rtd_auc']:.3f}; {found['tokens'] / found['train_secs']:,.0f} tokens a second,"
    f" {100 * found['mfu']:.1f} % of the peak"
  )


# {first word of a step's name: its line}
LINES: dict[str, Callable[[dict], str]] = {
  "device": _device,
  "numerics": _numerics,
  "resume": _resume,
  "memory": _memory,
  "input": _input,
  "fine-tuning": _finetuning,
  "pretraining": _pretraining,
}
