"""Configurations: found, changed, refused in one line, told apart; what `auto` stands for."""

import ast
import math

import jax
import pytest
from conftest import ROOT, no_warnings, parse_fields, python

from electra_jax.commands import cli
from electra_jax.config import compare, files, schema, specs, validate
from electra_jax.data.tokenizer import Vocab
from electra_jax.finetune import from_config
from electra_jax.interop import sources

NAMES = sorted(path.name for path in (ROOT / "configs").glob("*.py"))
IDS = 0, 100, 101, 102, 103, (0, 101, 102)
VOCAB = Vocab("wordpiece", "vocab.txt", True, True, 30522, "0" * 64, *IDS)


@pytest.mark.parametrize("name", NAMES)
def test_every_config_loads_and_has_base_fields_only(name):
  config = files.load(name)
  assert set(compare.flatten(config)) == set(compare.flatten(files.load("base.py")))
  config.data.dir = "somewhere"
  validate.check(config)
  spec = specs.make_spec(config, VOCAB)
  assert spec.discriminator.vocab_size == VOCAB.size
  has_generator = specs.has_generator_weights(config)
  small, main = ((c.num_layers, c.hidden_size) for c in (spec.generator, spec.discriminator))
  assert (small < main) == has_generator
  assert specs.make_optimizer_config(config).learning_rate > 0
  assert not sources.without_class(spec)  # transformers has classes for both networks


def test_a_generator_that_transformers_lacks_is_known_before_training():
  config = files.load_named("quickstart")
  config.generator.width_multiplier = 5 / 16
  reasons = sources.without_class(specs.make_spec(config, VOCAB))
  assert (
    reasons.keys() == {"generator"}
    and "embedding_size=128 at hidden_size=40" in reasons["generator"]
  )


@pytest.mark.parametrize("name", ["glue", "squad", "tagging", "own"])
def test_every_fine_tuning_config_has_its_base_fields_only(name):
  config = files.load(f"configs/finetune/{name}.py")
  assert set(compare.flatten(config)) == set(compare.flatten(files.load("finetune/base.py")))
  assert config.task and config.kind in ("text", "tagging", "qa")
  with pytest.raises(FileNotFoundError, match=f"did you mean configs/finetune/{name}.py"):
    files.resolve(f"configs/finetune/{name}s.py")


@pytest.mark.parametrize("base", ["base.py", "finetune/base.py"])
def test_every_config_field_is_read_somewhere(base):
  read = set()
  for path in (ROOT / "electra_jax").rglob("*.py"):
    tree = ast.parse(path.read_text())
    read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    # Some are passed on to a dataclass of the same fields, some are asked for by their names.
    read |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    read |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    read |= {
      node.target.id
      for node in ast.walk(tree)
      if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
  fields = compare.flatten(files.load(base))
  read |= {f"{name.partition('.')[2]}_schedule" for name in schema.names(has_schedule=True)}
  assert [field for field in fields if field.rsplit(".", 1)[-1] not in read] == []


def test_a_config_is_found_here_else_among_the_projects_own(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in ("configs/small.py", "configs/small", "small.py", "small"):
    assert files.resolve(name) == ROOT / "configs" / "small.py"
  (tmp_path / "configs").mkdir()
  mine = tmp_path / "configs" / "small.py"
  mine.write_text("from electra_jax.config import load\n\n\ndef get_config(arg):\n  ...\n")
  assert files.resolve("configs/small.py") == files.resolve("configs/small") == mine


def test_a_delta_anywhere_builds_on_base_and_cannot_invent_fields(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  delta = tmp_path / "mine.py"
  head = "from electra_jax.config import load\ndef get_config(arg=None):\n  c = load('base.py')\n"
  delta.write_text(head + "  c.train.steps = int(arg)\n  return c\n")
  assert files.load(delta, "7").train.steps == 7
  delta.write_text(head + "  c.train.stepz = 7\n  return c\n")
  with pytest.raises(ValueError, match=r"mine.py: .*stepz"):
    files.load(delta)
  delta.write_text("1 +\n")
  with pytest.raises(ValueError, match=r"mine.py is not a configuration: SyntaxError"):
    files.load(delta)
  for mistake in ("nothing", "import nosuchmodule", "[][1]", "int('x')"):
    for text in (f"{mistake}\n", f"{head}  {mistake}\n  return c\n"):
      delta.write_text(text)
      with pytest.raises(ValueError, match="mine.py|invalid literal"):
        files.load(delta)


PROGRAM = '''
"""A command."""
import sys
from electra_jax.commands import cli
def add_options(p):
  p.add_config()
def main(args):
  c = args.config
  if c.seed == 1: raise ValueError("a number\\nand another")
  if c.seed == 2: {}["bug"]
  if c.seed == 3: int("a bug of ours, in a program that is not ours")
  print(c.train.steps, c.optimizer.learning_rate, c.data.dir, c.model.remat)
sys.modules['electra_jax.commands.mine'] = sys.modules['__main__']
cli.start('mine')
'''


def run_program(tmp_path, *args, program=PROGRAM, **env):
  """Runs a program whose main prints a few fields; returns (exit code, stdout, stderr)."""
  file = tmp_path / "program.py"
  file.write_text(program)
  done = python(file, *args, cwd=ROOT, env=env)
  return done.returncode, done.stdout, done.stderr


def test_fields_change_from_the_command_line_in_every_spelling(tmp_path):
  args = "--config=configs/small.py --config.train.steps=12 --config.optimizer.learning_rate 1e-3"
  args += " --config.data.dir=/a/b --noconfig.model.remat"
  assert run_program(tmp_path, *args.split()) == (0, "12 0.001 /a/b False\n", "")
  assert run_program(tmp_path, "--config", "configs/base.py")[1] == "766000 0.0002 None False\n"


def test_an_empty_argument_is_a_value_of_its_own(tmp_path):
  args = ["--config", "configs/base.py", "--config.data.dir", "", "--config.train.steps=7"]
  assert run_program(tmp_path, *args)[1] == "7 0.0002  False\n"
  assert run_program(tmp_path, *args, "")[2].startswith("error: '' is not an option")


def test_what_stands_after_two_dashes_is_an_option_as_it_is(tmp_path):
  options = ["--config=other.py", "--config", "x", "", "--config.train.steps=9", "--", "--help"]
  args = ["--config=configs/base.py", "--config.train.steps=7", "--", *options]
  assert run_program(tmp_path, *args)[2].startswith("error: '--config=other.py' is not an option")
  program = PROGRAM.replace("def main(args):", "def main(args):\n  print(args.rest)")
  program = program.replace("  p.add_config()", "  p.add_config()\n  p.takes_rest = True")
  code, out, err = run_program(tmp_path, *args, program=program)
  assert (code, out, err) == (0, f"{options}\n7 0.0002 None False\n", "")


def test_a_stdout_that_is_not_utf_8_gets_boxes_and_letters_in_ascii(tmp_path):
  program = PROGRAM.replace(
    "def main(args):\n",
    "from rich.table import Table\n"
    "from electra_jax.runtime import terminal\n"
    "def main(args):\n"
    "  table = Table('0.5 \xb1 0.1')\n"
    "  table.add_row('a')\n"
    "  terminal.console().print(table)\n"
    "  terminal.log_console().print(table)\n",
  )
  args = "--config=configs/base.py", "--config.data.dir=/\xb1"
  code, out, err = run_program(tmp_path, *args, program=program, PYTHONIOENCODING="ascii")
  assert (code, err) == (0, "")
  assert out.count("| 0.5 \\xb1 0.1 |") == out.count("| a ") == 2
  assert out.endswith("766000 0.0002 /\\xb1 False\n")


@pytest.mark.parametrize("is_log", [True, False])
def test_a_stdout_that_cannot_be_written_is_an_error_unless_it_is_a_log(tmp_path, is_log):
  log = "  from electra_jax.runtime import terminal\n  print = terminal.log_console().print\n"
  program = PROGRAM.replace("def main(args):\n", f"def main(args):\n{log * is_log}")
  program = f"import sys\nsys.stdout = open('/dev/full', 'w')\n{program}"
  code, _, err = run_program(tmp_path, "--config=configs/base.py", program=program)
  assert (code, err) == ((0, "") if is_log else (1, "error: No space left on device\n"))


def test_a_bug_keeps_its_traceback_and_debugging_shows_all(tmp_path):
  for seed in (2, 3):
    code, _, err = run_program(tmp_path, "--config=configs/base.py", f"--config.seed={seed}")
    assert code == 1 and "Traceback" in err
  args = ("--config=configs/base.py", "--config.train.stepz=1")
  assert "Traceback" not in run_program(tmp_path, *args)[2]
  assert "Traceback" in run_program(tmp_path, *args, ELECTRA_JAX_DEBUG="1")[2]


def test_only_what_makes_a_run_what_it_is_counts_as_another_run():
  saved = {**compare.flatten(files.load("base.py")), "data.manifest": "a", "data.vocab_hash": "b"}
  free = {"log.every_steps": 1, "train.accumulation": 2, "model.remat": True, "data.dir": "moved"}
  assert compare.refuse_other_run(saved, {**saved, **free}, "", "DIR") == []
  other = {**saved, "train.steps": 1, "data.manifest": "c", "model.dropout": 0.0}
  with pytest.raises(ValueError) as error:
    compare.refuse_other_run(saved, other, "model", "DIR")
  assert "train.steps was 766000, is 1" in str(error.value)
  assert "data.manifest was 'a', is 'c'" in str(error.value)
  assert "model.dropout" not in str(error.value)
  allowed = compare.refuse_other_run(saved, other, "train.steps, data, model", "DIR")
  assert sorted(allowed) == ["data.manifest", "model.dropout", "train.steps"]
  with pytest.raises(ValueError, match="unknown field train.step; did you mean train.steps"):
    compare.refuse_other_run(saved, other, "train.step", "DIR")


WSD = "optimizer.schedule=wsd optimizer.decay_frac=0.2"
# Fields, and a regular expression of what the line has.
REFUSED = [
  ("model.num_heads=7", "config.model: 7 heads .*768"),
  ("objective.mask_prob=0.0", "between 0 and 1, got 0.0"),
  ("objective.mask_prob=1.0", "between 0 and 1, got 1.0"),
  ("data.seq_length=1024", "1024 .*512"),
  ("train.steps=0", "train.steps must be above 0, got 0"),
  ("train.batch_size=-8", "train.batch_size must be above 0, got -8"),
  ("model.dropout=1.0", "below 1, got 1.0"),
  ("optimizer.name=adan", "electra_adam.* got 'adan'"),
  ("health.on_nan=ignore", "stop, rollback, got 'ignore'"),
  ("health.on_warning=panic", "warn, stop, got 'panic'"),
  ("checkpoint.on_error=retry", "stop, continue, got 'retry'"),
  ("profile.steps=10-12", "100:105.*'10-12'"),
  ("profile.steps=9:12 train.steps=8", "profile.steps=9:12 .*train.steps=8"),
  ("health.window=0", "at least 1 .*got 0"),
  ("hosts.slow_ratio=0.0", "above 0, got 0.0"),
  ("objective.name=gan", "electra.* got 'gan'"),
  ("generator.width_multiplier=1e-4", "0.0001.*768"),
  ("train.batch_size=12", "batch size 12 .*8 devices"),
  ("train.accumulation=64", "batch size 256 .*8 devices x 64.*train.accumulation"),
  ("eval.batch_size=4", "eval.batch_size: batch size 4 .*8 devices"),
  ("objective.name=electric", "objective electric needs a generator of kind two_tower"),
  (
    "objective.name=adversarial generator.kind=uniform",
    "transformer or enhanced_mask_decoder or two",
  ),
  ("generator.kind=uniform generator.tie=gdes", "with weights: set it to embeddings"),
  ("objective.name=bert generator.tie=none", "with weights: set it to embeddings"),
  ("objective.name=bert generator.kind=uniform", "bert has no generator and one loss"),
  ("objective.name=bert objective.temperature=2.0", "no generator .* temperature"),
  ("generator.tie=all", "shares the encoder: set generator.width_multiplier .* to 1, got 0.33"),
  ("generator.kind=frozen", "set generator.tie=none, got embeddings"),
  ("generator.kind=frozen generator.tie=none", "only if generator.kind is frozen or froz"),
  ("generator.init_from=x", "frozen or frozen_mask_decoder: got x and transformer"),
  ("generator.tie=all generator.width_multiplier=1.0 generator.kind=two_tower", "two_.* has 2"),
  ("objective.name=adversarial objective.temperature=2.0", "adversarial needs the exact prob"),
  ("objective.name=electric generator.kind=two_tower objective.disallow_correct=True", "the exact"),
  ("generator.kind=unigram generator.sampling_dropout=False", "samples without dropout"),
  ("objective.name=bert optimizer.separate_optimizers=True", "but only one is trained"),
  ("optimizer.generator_clip_norm=2.0", "generator_clip_norm needs optimizer.separate_optimizers"),
  (
    "generator.kind=enhanced_mask_decoder model.positions=rope",
    "model.block=post_norm, global_every=1 and positions=learned or disentangled, got post_norm, 1",
  ),
  ("model.positions=disentangled model.attention=splash", "splash has no model.positions=disenta"),
  ("generator.kind=gan", "generator.kind must be one of transformer, enhanced_mask_decoder"),
  ("generator.tie=some", "generator.tie must be one of none, tokens"),
  ("objective.mask_prob_schedule=0%", "objective.mask_prob_schedule: a schedule needs"),
  ("objective.mask_prob_schedule=0%=0.2,100%=1.5", "mask_prob_schedule must be between 0 and 1, g"),
  ("objective.temperature_schedule=0=0", "temperature_schedule must be above 0, got 0"),
  ("objective.unigram_share_schedule=0=2", "share_schedule must be from 0 to 1, got 2"),
  ("objective.discriminator_weight_schedule=0%=1e400", "weight_schedule: a schedule needs POSI"),
  (f"objective.discriminator_weight_schedule=0=1,1{400 * '0'}=1", "a schedule needs POSITION=VAL"),
  ("train.minutes=1.0", "train.minutes=1 needs optimizer.schedule=wsd"),
  ("train.minutes=1.0 optimizer.schedule=wsd", "train.minutes=1 needs optimizer.schedule=wsd"),
  ("train.minutes=-1.0", "train.minutes must be above 0"),
  ("optimizer.decay_frac=0.2", "decay_frac=0.2 needs schedule=wsd and decay_steps=0"),
  (
    f"train.minutes=1.0 {WSD} objective.mask_prob_schedule=0%=0.3,9%=0.1",
    "0.1' has positions in %",
  ),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED)
def test_what_does_not_fit_together_is_refused_with_the_numbers_and_the_reason(fields, reason):
  config = files.load("base.py")
  config.data.dir = "somewhere"
  config.update_from_flattened_dict(parse_fields(fields))
  with pytest.raises(ValueError, match=reason):
    validate.check(config)
    validate.check_devices(config)
    specs.make_spec(config, VOCAB)


@pytest.mark.parametrize(
  ("base", "check"), [("base.py", validate.check_fields), ("finetune/base.py", from_config.check)]
)
def test_every_number_of_a_config_is_finite_and_has_a_lower_bound(base, check):
  fields = {k: v for k, v in compare.flatten(files.load(base)).items() if not isinstance(v, str)}
  signed = ("tagging.word_column", "tagging.tag_column", "qa.threshold")
  unset = ("optimizer.generator_weight_decay", "optimizer.learning_rate", "train.epochs")
  for field, value in fields.items():
    wrong = [-1] * (field not in signed and isinstance(value, int | float))
    wrong += [math.inf, math.nan, -math.inf] * (isinstance(value, float) or field in unset)
    if field in ("optimizer.clip_norm", "hosts.slow_ratio", "health.loss_spike", "qa.threshold"):
      wrong = [math.nan]  # infinity: no limit
    for number in wrong if not isinstance(value, bool) else ():
      config = files.load(base)
      config.update_from_flattened_dict({field: number})
      with pytest.raises(ValueError, match=rf"config\.{field} must be .*, got {number}"):
        check(config)


def test_seeds_are_those_that_jax_does_not_wrap():
  config = files.load("base.py")
  for seed in (2**32, 2**63):
    config.seed = seed
    with pytest.raises(ValueError, match=rf"at least 0 and below 2\*\*32, got .*{seed}"):
      validate.check_fields(config)
  config.seed = 2**32 - 1
  validate.check_fields(config)
  config = files.load("finetune/base.py")
  config.seed, config.seeds = 2**32 - 2, 2
  from_config.check(config)
  config.seeds = 3
  with pytest.raises(ValueError, match=rf"below 2\*\*32, got config.seed up to {2**32}"):
    from_config.check(config)


def test_a_missing_extra_is_named():
  missing = ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")
  assert cli.explain(missing).endswith("pip install 'electra_jax[data]'")
  assert cli.explain(ModuleNotFoundError("No module named 'typo'", name="typo")) is None


def test_a_weight_that_the_objective_does_not_read_is_a_warning():
  config = files.load("base.py")
  config.objective.contrast_weight = 2.0
  with pytest.warns(UserWarning, match="electra does not read objective.contrast_weight"):
    validate.check_fields(config)
  config.objective.name = "coco_lm"
  with no_warnings():
    validate.check_fields(config)


@pytest.mark.parametrize(
  ("name", "read", "unread"),
  [
    ("electra", "", "model.window model.rope_theta model.local_rope_theta"),
    ("bert", "objective.mlm_weight", "objective.discriminator_weight generator.width_multiplier"),
    ("replace_mlm", "generator.width_multiplier objective.discriminator_weight", "model.window"),
    ("electric", "objective.mlm_weight", "objective.mask_token_prob"),  # it reads no [MASK]
  ],
)
def test_overrides_that_nothing_reads_are_a_warning(name, read, unread):
  config = files.load("base.py")
  config.objective.name = name
  config.generator.kind = "two_tower" if name == "electric" else "transformer"
  with no_warnings():
    validate.warn_of_unread_overrides(config, ["seed", *read.split()])
  with pytest.warns(UserWarning, match=f"does not read {', '.join(unread.split())}$"):
    validate.warn_of_unread_overrides(config, [*read.split(), *unread.split()])


@pytest.mark.parametrize("size", ["small", "base", "large", "quickstart", "modern:17m"])
def test_every_objective_is_a_delta_to_every_size(size):
  base = compare.flatten(files.load_size(size))
  for name in NAMES:
    if "load_size(arg)" in (ROOT / "configs" / name).read_text():
      changed = compare.flatten(files.load(name, size))
      assert sum(base[k] != v for k, v in changed.items()) <= 6, name
      validate.check_fields(files.load(name, size))


@pytest.mark.parametrize(
  ("platform", "asked", "dropout", "head", "expected"),
  [
    ("cpu", ("auto", "auto"), 0.0, 64, ("float32", "xla")),
    ("tpu", ("auto", "auto"), 0.0, 64, ("bfloat16", "xla")),
    ("gpu", ("auto", "auto"), 0.0, 64, ("bfloat16", "cudnn")),
    ("gpu", ("auto", "auto"), 0.1, 64, ("bfloat16", "xla")),  # cuDNN has no dropout here
    ("gpu", ("auto", "auto"), 0.0, 20, ("bfloat16", "xla")),  # nor heads of any width
    ("gpu", ("float32", "auto"), 0.0, 64, ("float32", "xla")),  # nor float32
    ("gpu", ("auto", "xla"), 0.0, 64, ("bfloat16", "xla")),
    ("cpu", ("bfloat16", "auto"), 0.0, 64, ("bfloat16", "xla")),
  ],
)
def test_auto_is_bfloat16_on_accelerators_and_cudnn_where_it_can(
  monkeypatch, platform, asked, dropout, head, expected
):
  group = files.load("base.py").model
  group.dtype, group.attention = asked
  group.attention_dropout = dropout
  monkeypatch.setattr(jax, "default_backend", lambda: platform)
  compute = specs.make_compute(group, head, "learned")
  assert (compute.dtype, compute.attention) == expected


def test_auto_in_fine_tuning_goes_by_the_positions_of_the_network(monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  group = files.load("finetune/base.py").model
  group.attention_dropout = 0.0
  found = {x: specs.make_compute(group, 64, x).attention for x in ("rope", "disentangled")}
  assert found == {"rope": "cudnn", "disentangled": "xla"}


@pytest.mark.parametrize(
  ("platform", "asked", "loops"), [("gpu", 0, 1), ("gpu", 1, 5), ("cpu", 0, 5), ("cpu", 3, 2)]
)
def test_layers_are_compiled_in_a_row_on_a_gpu_unless_told(monkeypatch, platform, asked, loops):
  group = files.load("base.py").model
  group.unroll, group.attention, group.num_layers = asked, "xla", 5
  monkeypatch.setattr(jax, "default_backend", lambda: platform)
  unroll = specs.make_compute(group, 64, "learned").unroll
  assert -(-group.num_layers // min(unroll, group.num_layers)) == loops
