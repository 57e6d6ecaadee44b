"""Reports of runs: the numbers on the page, the verdict, and what a stranger may have written."""

import dataclasses
import html.parser
import json
import shutil
from pathlib import Path

import pytest

from electra_jax.commands import cli
from electra_jax.evaluate import samples
from electra_jax.monitor import bands, journal
from electra_jax.report import figures, page, saved_run, tables, verdict

GOLDEN = Path(__file__).parent / "golden" / "version_0_1"
EVIL = "</script><b>a & b"


class Reader(html.parser.HTMLParser):
  """Reads the tables of a page and the tags with their attributes."""

  def __init__(self, text: str):
    super().__init__()
    self.tables, self.tags, self.text, self._cell = {}, [], "", False
    self.feed(text)

  def handle_starttag(self, tag, attributes):
    self.tags.append((tag, dict(attributes)))
    if tag == "table":
      self._rows = self.tables[dict(attributes)["id"]] = []
    elif tag == "tr":
      self._rows.append([])
    elif tag in ("td", "th"):
      self._rows[-1].append("")
      self._cell = True

  def handle_endtag(self, tag):
    self._cell = self._cell and tag not in ("td", "th")

  def handle_data(self, data):
    self.text += data
    if self._cell:
      self._rows[-1][-1] += data


def lines(run: Path) -> list[dict]:
  return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
  """A run of an earlier version, and the same with another name, a journal and a worse ending."""
  root = tmp_path_factory.mktemp("report")
  shutil.copytree(GOLDEN / "data", root / "data")
  for name in ("first", "second"):
    shutil.copytree(GOLDEN / "run", root / name / "run")
    config = json.loads((root / name / "run" / "config.json").read_text())
    config["data"]["dir"] = str(root / "data")
    config["health"] = {"after_step": 0 if name == "second" else 100}
    (root / name / "run" / "config.json").write_text(json.dumps(config))
  second = (root / "second" / "run").rename(root / "second" / EVIL.replace("/", "⁄"))
  worse = [line | {"rtd_auc": 0.5} for line in lines(second)]
  (second / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in worse))
  events = journal.Journal(second)
  start = {"code": "1.0", "jax": "0.10", "devices": 4, "device_kind": "H100", "command": EVIL}
  for hours in (1, 2):  # it was stopped after an hour
    events.write("start", **start)
    events.write("goodput", step=4, secs={"steps": 60.0})
    events.write("goodput", step=8, secs={"steps": 3000.0 * hours, "save": 600.0 * hours})
  events.write("warning", text=EVIL)
  return [root / "first" / "run", second]


@pytest.fixture
def run(runs) -> saved_run.SavedRun:
  """The first, of step 4 of 8; collapses are checked from step 100 on."""
  return saved_run.read(runs[0], "run")


@pytest.fixture(scope="module")
def text(runs) -> str:
  return page.render(runs, price=2.0)


def test_the_numbers_of_the_page_are_those_of_the_log(runs, text):
  found = {row[0]: row[1:] for row in Reader(text).tables["evaluations"]}
  last = [[x for x in lines(run) if x["split"] == "heldout"][-1] for run in runs]
  assert found["mlm loss"][:2] == [f"{x['mlm_loss']:.4f} nats" for x in last]
  assert found["rtd auc"][1:] == ["0.5", "0.5 (chance)"]
  assert "unigram entropy" in found["mlm loss"][2]
  time = {row[0]: row[1:] for row in Reader(text).tables["time"]}
  assert time["steps"] == ["-", "2:30:00 (83.3 %)"] and time["save"][1] == "0:30:00 (16.7 %)"
  ran = {row[0]: row[1:] for row in Reader(text).tables["overview"]}
  assert ran["hours"][1] == "3.00" and ran["cost"][1] == "24.00"  # on four devices
  assert ran["code"] == ["not recorded", "1.0"] and ran["devices"][1].startswith("4 x H100")
  assert "discriminator 0.0" in ran["parameters"][0]
  fields = {row[0]: row[1:] for row in Reader(text).tables["fields"]}
  assert fields["model.hidden_size"] == ["768", "32", "32"] and "model.init_stddev" in fields


def test_the_cost_is_that_of_the_devices_of_each_start(runs):
  run = saved_run.read(runs[1], "run")
  events = []
  for devices, hours in ((8, 4), (8, 6), (1, 1)):
    events += [{"event": "start", "devices": devices, "device_kind": "H100", "jax": "0.10"}]
    events += [{"event": "goodput", "secs": {"steps": 3600.0 * x}} for x in (hours / 2, hours)]
  run.history[:] = [run.history[-1] | {"elapsed_secs": 3600.0}]
  # A start without seconds has those of the lines, and a run of an earlier version one device.
  for found, cost in ((events, "162.00"), (events[:1], "16.00"), ([], "2.00")):
    rows = dict(tables.overview(saved_run.arms([dataclasses.replace(run, events=found)]), 2.0))
    assert rows["cost"] == cost


def test_a_run_stopped_between_two_lines_has_done_the_steps_of_its_checkpoint(run):
  assert run.done == 4 and list(run.checkpoints) == [4]
  stopped = dataclasses.replace(run, checkpoints={4: 1, 6: 1})
  rows, c = dict(tables.overview(saved_run.arms([stopped]), None)), run.config
  assert rows["seen"].startswith(f"{6 * c.train.batch_size * run.manifest['seq_length']:,} tokens")
  assert rows["FLOPs in matrix products"] == f"{6 * run.flops_per_step:.3g}"
  assert verdict.judge(stopped).sentences[0] == "It is at step 6 of 8."


def test_the_page_is_one_file_that_loads_nothing_and_runs_nothing_it_was_given(text):
  tags = Reader(text).tags
  loads = [x for tag in tags for k, x in tag[1].items() if k in ("src", "href", "data", "action")]
  assert loads == ["data:,"]
  assert len(text.encode()) < 5e6
  assert not any(tag == "b" and "a & b" in str(x) for tag, x in tags)
  assert EVIL not in text  # neither in the page nor in what its scripts read
  assert EVIL in Reader(text).text  # but shown: the warning and the command


def test_the_verdict_comes_first_with_its_reasons(runs, text):
  shown = Reader(text[text.index("<body>") :]).text
  assert shown.index("did not learn") < shown.index("Overview") < shown.index("Checkpoints")
  bad = saved_run.read(runs[1], "bad")
  entropy, loss = 0.85 * bad.baselines.entropy, bad.last("heldout")["mlm_loss"]
  judged = verdict.judge(bad)
  assert judged.word == verdict.BAD and judged.sentences == (
    "It is at step 4 of 8.",
    f"The held-out mlm loss is {loss:.4f} nats, {abs(loss - entropy):.2f}"
    f" {'below' if loss < entropy else 'above'} the unigram entropy with copies"
    f" {entropy:.2f}.",
    "Detection has an AUC of 0.500 (held-out; chance is 0.5).",
    "1 warning, below.",
  )


def test_a_run_that_has_just_begun_is_not_condemned(run):
  worse = [line | {"rtd_auc": 0.5} for line in run.history]
  assert verdict.judge(dataclasses.replace(run, history=worse)).word == verdict.EARLY
  ended = [*worse, worse[-1] | {"step": run.config.train.steps}]
  assert verdict.judge(dataclasses.replace(run, history=ended)).word == verdict.BAD


def test_a_run_without_lines_is_left_out_of_a_report_of_several(runs, tmp_path):
  shutil.copytree(runs[0], tmp_path / "begun")
  (tmp_path / "begun" / "metrics.jsonl").write_text("")
  with pytest.warns(UserWarning, match="left out: .*begun/metrics.jsonl has no line yet"):
    assert page.render([tmp_path / "begun", runs[0]]).count("begun") == 0
  with pytest.raises(saved_run.JustBegunError):
    page.render([tmp_path / "begun"])


def test_a_run_of_which_nothing_was_compared_is_not_called_healthy(run):
  begun = dataclasses.replace(run, history=run.history[:1], checkpoints={})
  assert begun.last("heldout")["step"] == 0 and verdict.judge(begun).word == verdict.EARLY
  line = {"step": run.config.train.steps, "split": "train", "mlm_loss": 12.0, "mlm_accuracy": 0.0}
  no_heldout = {"baselines": type(run.baselines)(), "history": [line]}
  judged = verdict.judge(dataclasses.replace(run, **no_heldout))
  told = "It finished its 8 steps.", "No metric could be compared with a trivial baseline."
  assert judged == (verdict.UNKNOWN, (*told, "No warnings.")) and judged.word in page.KINDS
  warned = dataclasses.replace(run, **no_heldout, events=[{"event": "warning", "text": "a"}])
  assert verdict.judge(warned).word == verdict.LOOK


@pytest.mark.parametrize(
  ("name", "weight", "bad"),
  [
    ("electra", "discriminator", {"rtd_loss": 0.6, "rtd_auc": 0.5}),
    ("electra_mlm", "replace_mlm", {"replace_mlm_loss": 99.0, "replace_mlm_accuracy": 0.0}),
    ("metro", "replace_mlm", {"corrective_loss": 99.0, "corrective_accuracy": 0.0}),
    ("replace_mlm", "discriminator", {"replace_mlm_loss": 99.0, "replace_mlm_accuracy": 0.0}),
    ("all_tokens_mlm", "discriminator", {"all_tokens_loss": 99.0, "all_tokens_accuracy": 0.0}),
  ],
)
def test_a_loss_is_not_judged_before_a_schedule_gives_it_a_weight(run, name, weight, bad):
  c = run.config.copy_and_resolve_references()
  c.train.steps, c.health.after_step, c.objective.name = 100_000, 20_000, name
  c.objective[f"{weight}_weight_schedule"] = "50000=0,50000=1"
  line = {"mlm_loss": 1.0, "mlm_accuracy": 0.5, "sampled_accuracy": 0.5, "replaced": 0.1}
  line |= bad | {"split": "heldout"}

  def judged(*steps: int) -> verdict.Verdict:
    history = [line | {"step": step} for step in steps]
    return verdict.judge(dataclasses.replace(run, config=c, history=history))

  early = judged(30_000)
  assert early.word == verdict.GOOD and "Detection" not in str(early.sentences)
  assert judged(30_000, 49_000, 60_000).word == verdict.EARLY  # as long as a run is at its start
  assert judged(30_000, 49_000, 70_000).word == verdict.BAD
  line["mlm_loss"] = 99.0  # the generator is trained from the start
  assert judged(30_000).word == verdict.BAD
  line["mlm_loss"] = 1.0
  c.objective[f"{weight}_weight_schedule"] = ""
  c.objective[f"{weight}_weight"] = 0.0  # never changes, so it may be a mistake
  assert judged(30_000).word == verdict.BAD


def test_warnings_without_a_failure_ask_for_a_look(runs):
  first, second = (saved_run.read(run, run.name) for run in runs)
  learned = [x | {"mlm_loss": 1.0, "rtd_auc": 0.9} for x in first.history]
  for run, word in ((first, verdict.GOOD), (second, verdict.LOOK)):
    assert verdict.judge(dataclasses.replace(run, history=learned)).word == word
  early = [x for x in learned if x["step"] == 0 or x["split"] == "train"][:2]
  judged = verdict.judge(dataclasses.replace(first, history=early))
  assert "training mlm loss" in str(judged.sentences)  # an evaluation at step 0 says nothing


def test_a_loss_of_tokens_is_judged_whatever_its_name(run):
  line = run.last("heldout") | {"step": 4, "mine_loss": 99.0, "mine_accuracy": 0.0}
  run = dataclasses.replace(run, history=[line])
  (finding,) = [x for x in verdict.findings(run) if "mine loss is 99.0000 nats" in x.sentence]
  assert not finding.learned and "above the unigram entropy" in finding.sentence
  assert figures.group("mine_loss", list(line)) == "generator"
  level = bands.Level(mean=2.0, tolerance=0.1)
  band = bands.Band(1, 3, {}, {"heldout": {4: dict.fromkeys(("mine_loss", "mlm_loss"), level)}})
  (text,) = bands.BandMonitor(band, "ref.json").check("heldout", 4, line | {"mlm_loss": 2.0})
  assert "(1) a lower learning rate" in text


def test_each_run_is_compared_with_its_own_baseline(runs):
  one, two = (saved_run.read(run, run.name) for run in runs)
  other = dataclasses.replace(two, baselines=dataclasses.replace(two.baselines, entropy=2.0))
  own = f"{0.85 * one.baselines.entropy:.4f} nats"
  for second, expected, colours in (
    (two, own, ["#777777"]),
    (other, f"{own} / 1.7000 nats", list(figures.COLOURS[:2])),
  ):
    rows = {row[0]: row[-1] for row in tables.evaluations(saved_run.arms([one, second]))}
    assert rows["mlm loss"] == f"{expected} (held-out unigram entropy with copies)"
    panel = figures.panel("mlm_loss", saved_run.arms([one, second]))
    drawn = [x.glyph for x in panel.plot.renderers]
    assert [glyph.line_color for glyph in drawn if glyph.line_dash] == colours


def with_seed(run, seed: int, name: str, change: float, **fields):
  """Returns a run of another seed whose losses are higher."""
  c = run.config.copy_and_resolve_references()
  c.seed = seed
  c.update_from_flattened_dict(fields)
  history = [line | {"mlm_loss": line["mlm_loss"] + change} for line in run.history]
  return dataclasses.replace(run, config=c, name=name, history=history)


def test_seeds_of_one_recipe_are_one_arm_with_mean_and_spread(runs, tmp_path):
  one = saved_run.read(runs[0], "run-0")
  more = [with_seed(one, seed, f"run-{seed}", 0.1 * seed) for seed in (1, 2)]
  other = with_seed(one, 0, "wide", 0.0, **{"objective.mask_prob": 0.4})
  arms = saved_run.arms([one, other, *more])
  assert [arm.name for arm in arms] == ["run (3 seeds)", "wide"]
  assert [run.name for run in arms[0].runs] == ["run-0", "run-1", "run-2"]
  mean = one.last("heldout")["mlm_loss"] + 0.1
  found = {row[0]: row[1:] for row in tables.evaluations(arms)}
  assert found["mlm loss"][0] == f"{mean:.4f} nats ± 0.1000 nats"  # of 0, 0.1 and 0.2
  assert found["mlm loss"][1] == f"{mean - 0.1:.4f} nats"
  assert dict((row[0], row[2]) for row in tables.fields(arms))["seed"] == "0 / 1 / 2"
  columns = figures.spread(arms[0], "heldout", "mlm_loss")
  assert columns["step"] == [x["step"] for x in one.history if x["split"] == "heldout"]
  assert columns["value"][-1] == pytest.approx(mean)
  assert (columns["low"][-1], columns["high"][-1]) == pytest.approx((mean - 0.1, mean + 0.1))
  # A step that one of the seeds lacks is left out.
  shorter = dataclasses.replace(more[1], history=more[1].history[:-1])
  few = figures.spread(saved_run.arms([one, shorter])[0], "heldout", "mlm_loss")
  assert len(few["step"]) == len(columns["step"]) - 1
  # Two runs of the same seed stay apart. Seeds that start from seeds of one recipe are one arm.
  assert len(saved_run.arms([one, with_seed(one, 0, "again", 0.0)])) == 2
  starts = []
  for seed in (0, 1):
    shutil.copytree(runs[0], tmp_path / f"start-{seed}")
    saved = json.loads((runs[0] / "config.json").read_text()) | {"seed": seed}
    (tmp_path / f"start-{seed}" / "config.json").write_text(json.dumps(saved))
    fields = {"init_from": str(tmp_path / f"start-{seed}")}
    starts.append(with_seed(one, seed, f"after-{seed}", 0.0, **fields))
  assert [arm.name for arm in saved_run.arms([*starts, one])] == ["after (2 seeds)", "run-0"]


def test_an_arm_has_the_worst_verdict_of_its_seeds(runs):
  one = saved_run.read(runs[0], "run-0")
  learned = [line | {"mlm_loss": 1.0, "rtd_auc": 0.9} for line in one.history]
  good = dataclasses.replace(one, history=learned)
  bad = with_seed(dataclasses.replace(good, history=learned), 1, "run-1", 98.0)
  bad.config.health.after_step = 0
  (arm,) = saved_run.arms([good, bad])
  judged, own = verdict.judge_arm(arm)
  assert judged.word == verdict.BAD
  assert judged.sentences == ("1 of 2 runs: did not learn, 1 of 2 runs: healthy.",)
  assert [found.word for found in own.values()] == [verdict.GOOD, verdict.BAD]


def test_pairs_and_fine_tuning_have_intervals(tmp_path):
  one = {"pairs": 100, "accuracy": 0.75, "low": 0.657, "high": 0.825}
  content = {"model": "runs/small", "scorer": "rtd", "all": one, "categories": {"islands": one}}
  (tmp_path / "pairs.json").write_text(json.dumps(content))
  assert tables.minimal_pairs([tmp_path])[1:] == [
    ["small", "rtd", "all pairs", "100", "75.00", "65.7 to 82.5"],
    ["", "", "islands", "100", "75.00", "65.7 to 82.5"],
  ]
  other = one | {"pairs": 3}
  for categories, names in (({"all": one}, []), ({"all": other, "x": one}, ["all", "x"])):
    (tmp_path / "pairs.json").write_text(json.dumps(content | {"categories": categories}))
    found = tables.minimal_pairs([tmp_path])[1:]
    assert [row[2] for row in found] == ["all pairs", *names] and found[0][3] == "100"
  rows = [
    {"task": "mrpc", "split": "dev", "seed": i, "metrics": {"accuracy": x}, "collapsed": False}
    for i, x in enumerate((61.0, 64.0, 63.0))
  ]
  rows[0]["majority"] = {"accuracy": 68.38}
  (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  (row,) = tables.finetuning([tmp_path])[1:]
  # Student's t of 2 degrees of freedom is 4.3027.
  assert row[1:] == ["mrpc", "dev", "accuracy", "63.00", "62.67", "58.87 to 66.46", "3", "68.38"]
  with pytest.raises(ValueError, match="is not a result of electra-jax evaluate pairs"):
    tables.minimal_pairs([tmp_path / "none"])
  with pytest.raises(ValueError, match="holds no results of electra-jax finetune"):
    tables.finetuning([tmp_path / "none"])
  for damage in (b'{"task"', b"[]", b'{"task": "mrpc"}', b"\xff"):
    (tmp_path / "results.jsonl").write_bytes(json.dumps(rows[0]).encode() + b"\n" + damage)
    with pytest.raises(ValueError, match="results.jsonl:2: not a row of results") as error:
      tables.finetuning([tmp_path])
    assert error.traceback[-1].path.name == "results.py"  # so it is shown in one line


def test_a_journal_of_an_earlier_version_does_not_say_where_a_start_began(runs):
  run = saved_run.read(runs[1], "run")
  assert all("step" not in event for event in run.events if event["event"] == "start")
  begun, resumed = ({"event": "start", "step": step} for step in (0, 8))
  assert dataclasses.replace(run, events=[*run.events, resumed]).warnings == [EVIL]
  assert dataclasses.replace(run, events=[*run.events, begun, resumed]).warnings == []


def test_the_next_command_of_a_finished_run_sets_each_field_once(run):
  given = "electra-jax train --config=x.py -config.train.steps 8 --workdir=w --config.seed=1"
  given += " --config.allow_config_change=train.steps --config.train.steps=9"
  done = dataclasses.replace(run, events=[{"event": "start", "command": given}], checkpoints={8: 1})
  assert "train.steps" not in str(tables.commands(done))  # nor does docs/healthy.md advise it
  learned = [x | {"mlm_loss": 1.0, "rtd_auc": 0.9} for x in run.history]  # else it is the verdict's
  found = tables.commands(dataclasses.replace(done, history=learned))
  assert found["train longer, from the start: the learning rate has ended"] == (
    "electra-jax train --config=x.py --config.seed=1"
    f" --config.train.steps=STEPS --workdir={run.folder}-longer"
  )


def test_a_command_names_no_python_of_an_environment(run):
  for typed in ("/me/.venv/bin/python3.12 -m electra_jax", "/me/.venv/bin/electra-jax"):
    event = {"event": "start", "command": f"{typed} train --workdir=/me/runs/a"}
    known = tables.commands(dataclasses.replace(run, events=[event]))["continue training"]
    assert known == "electra-jax train --workdir=/me/runs/a"


def test_the_samples_of_a_run_are_shown_as_text(runs, tmp_path):
  folders = [shutil.copytree(runs[0], tmp_path / name) for name in ("a", "b")]
  assert "What it has learned" not in page.render(folders[:1])
  mark = {"text": "cat", "kind": "missed", "probability": 0.126, "was": EVIL}
  row = {"text": f"{EVIL} [MASK]", "word": "dog", "choices": [["cat", 0.5], ["dog", 0.25]]}
  found = {"filled": {"right": 0, "count": 7, "sentences": [row]}}
  found["detected"] = {"found": 1, "count": 3, "texts": 2, "by_chance": 0.4}
  found["detected"]["sentences"] = [[{"text": "the "}, mark, {"text": "."}]]
  samples.write(folders[1], found)
  text = page.render(folders)
  shown = " ".join(Reader(text).text.split())
  assert f"{EVIL} [MASK] cat 50 %, dog 25 %" in shown and EVIL not in text
  assert f"the cat 13 % . cat was {EVIL}" in shown.replace("%.", "% .")
  assert "found 1 of 3 replaced words in 2 sentences" in shown and "right in 0 of 7" in shown
  samples.write(folders[1], {"filled": found["filled"]})
  assert "replaced words in" not in page.render(folders)


def test_an_interval_of_pairs_is_of_those_that_were_scored(runs):
  for count, interval in ((100, " (65.7 to 82.5)"), (None, "")):  # by hand; earlier versions
    run = saved_run.read(runs[1], "run")
    history = [run.last("heldout") | {"pairs_accuracy": 0.75}]
    events = [{"event": "start"} | ({"pairs": count} if count else {})]
    (arm,) = saved_run.arms([dataclasses.replace(run, history=history, events=events)])
    rows = dict(row[:2] for row in tables.evaluations([arm]))
    assert rows["pairs accuracy"] == f"75.0 %{interval}"


def test_the_command_writes_the_file_and_names_it(runs, tmp_path, capsys):
  out = tmp_path / "report.html"
  cli.call("report", [str(runs[0]), f"--out={out}"])
  assert capsys.readouterr().out.startswith(f"report: {out} (1.")
  assert Reader(out.read_text()).tables["checkpoints"][1][:2] == ["run", "4"]
  with pytest.raises(ValueError, match="is not a run"):
    cli.call("report", [str(tmp_path), f"--out={out}"])


@pytest.mark.parametrize(
  ("line", "word"),
  [
    ({}, verdict.GOOD),
    ({"mlm_loss": 0.86}, verdict.BAD),  # times the entropy: frequencies and copies
    ({"mlm_loss": 0.85}, verdict.BAD),
    ({"mlm_loss": 0.84}, verdict.GOOD),
    ({"rtd_auc": 0.52}, verdict.BAD),
    ({"rtd_auc": 0.53}, verdict.GOOD),
    ({"rtd_auc": 0.58, "unigram_auc": 0.55}, verdict.BAD),  # docs/healthy.md: generator too strong
    ({"rtd_auc": 0.58, "unigram_auc": 0.6}, verdict.BAD),
    ({"rtd_auc": 0.58, "unigram_auc": 0.61}, verdict.GOOD),
    ({"unigram_auc": None}, verdict.GOOD),
  ],
)
def test_the_verdict_is_that_of_the_page_and_of_the_terminal(run, line, word):
  good = {"step": run.config.train.steps, "mlm_loss": 0.5, "rtd_auc": 0.75, "unigram_auc": 0.9}
  found = run.last("heldout") | good | line
  found["mlm_loss"] *= run.baselines.entropy
  judged = verdict.judge(dataclasses.replace(run, history=[found]))
  assert judged.word == word, judged.sentences
  assert ("the generator is too strong" in str(judged)) == (found["unigram_auc"] in (0.55, 0.6))
  # The terminal, the report and the curves show the same baseline.
  level = run.baselines.level("mlm_loss", found)
  assert run.baselines.shown("mlm_loss", found) == f"{0.85 * run.baselines.entropy:.4f} nats"
  (text,) = [x for x in judged.sentences if "mlm loss" in x]
  assert f"the unigram entropy with copies {level[1]:.2f}." in text
  assert ("above the" in text) == (line.get("mlm_loss", 0.5) >= 0.85)


def test_targets_that_are_all_hidden_cannot_be_copied(run):
  hidden = dataclasses.replace(run.baselines, masked=1.0)
  name, level = hidden.level("mlm_loss", run.last("heldout"))
  assert (name, level) == ("held-out unigram entropy", run.baselines.entropy)
