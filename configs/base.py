"""ELECTRA-Base as in the paper (Clark et al. 2020, Table 6), and the home of every field.

Command:  python -m electra_jax.train --config=configs/base.py --workdir=DIR
          --config.data.dir=SHARDS
Hardware: the paper used 16 TPUv3 for four days; small.py and quickstart.py are for less.
Expected: GLUE dev average 85.1 after fine-tuning (paper, Table 1).

The other files are deltas to this one. A field has its default here or nowhere.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` (the part after the colon) is not used here."""
  if arg:
    raise ValueError(f"the configuration takes no argument, got {arg!r}")
  c = ConfigDict()
  c.seed = 0  # of everything: initial weights, order of the data, masks, samples, dropout
  # Start from these parameters with a new optimizer: another run's workdir, an orbax export, a
  # folder of Hugging Face, hf://ORG/NAME[@REVISION] or a TF1 checkpoint of the original. Its
  # networks decide the fields of model and generator that are not set
  c.init_from = placeholder(str)
  c.init_step = placeholder(int)  # which of that run's checkpoints; None: the newest
  # Take the moments of its optimizer too: another phase of the same networks, with other lengths,
  # batches or rates. It counts from step 0; give it another seed, or it reads the same data again
  c.init_optimizer = False
  c.allow_config_change = ""  # fields (comma-separated) that may differ from the run being resumed

  c.model = m = ConfigDict()  # the discriminator: the network that is kept
  m.hidden_size = 768  # width D (Table 6)
  m.num_layers = 12  # blocks N (Table 6)
  m.num_heads = 12  # heads H; D / H = 64 in every model of the paper
  m.ffn_size = 3072  # inner width of the feed-forward layer, 4 D (Table 6)
  m.embedding_size = 768  # width E of the embedding tables; projected to D if different (Table 6)
  m.max_positions = 512  # rows of the position table; the longest sequence
  m.dropout = 0.1  # rate on embeddings and on both outputs of a block (Table 6)
  m.attention_dropout = 0.1  # rate on attention probabilities (Table 6)
  m.init_stddev = 0.02  # of the truncated normal that most weights start from (BERT)
  m.layer_norm_eps = 1e-12  # inside the root (BERT)
  # The next fields are kinds of layers: BERT's here, ModernBERT's in modern.py
  m.block = "post_norm"  # post_norm, or pre_norm: sums of the blocks, normalised at the end
  m.norm = "layer_norm"  # layer_norm, layer_norm_no_bias or rms_norm
  m.feed_forward = "gelu"  # gelu, or geglu and swiglu, which have a second matrix as a gate
  m.positions = "learned"  # learned: a table; rope: rotary, with a theta for each kind of layer
  m.rope_theta = 10_000.0  # of the layers that attend to all tokens
  m.local_rope_theta = 10_000.0  # of the layers that attend to a window
  m.global_every = (
    1  # 3: layers 0, 3, 6 ... attend to all tokens, the others to a window; 1: all do
  )
  m.window = 128  # tokens of the window: window / 2 on each side
  m.biases = True  # of dense layers, except of those that return logits
  m.token_types = True  # embed whether a token is of segment A or B
  m.qk_norm = False  # normalise the queries and keys of each head
  m.embedding_norm = True  # normalise the sum of the embeddings
  m.first_norm = True  # pre_norm: normalise the embeddings once more before the first attention
  m.scaled_init = False  # a block's two output layers start with init_stddev / sqrt(2 N) (Megatron)
  m.embedding_dropout = placeholder(float)  # not set = dropout
  m.ffn_dropout = placeholder(float)  # of the feed-forward output; not set = dropout
  m.head_norm = False  # normalise the hidden layer of the head that detects replacements
  m.dtype = "auto"  # compute: float32, bfloat16, or auto = bfloat16 on accelerators, float32 on CPU
  m.attention = "auto"  # xla, cudnn, splash (TPU), or auto = cudnn on a GPU where it can, else xla
  m.unroll = 0  # layers compiled in a row, at least global_every; 0: all on a GPU, else the fewest
  m.remat = False  # recompute each block in the backward pass: less memory, a third more FLOPs

  c.generator = g = ConfigDict()
  # transformer: the paper's; two_tower: two causal ones on the clean text (Electric); uniform or
  # unigram: no network; frozen: a masked language model that is not trained (init_from)
  g.kind = "transformer"
  # What both networks share: none, tokens, embeddings (Section 3.2), all (same size), or gdes: the
  # discriminator adds its own change to embeddings that the generator alone trains (DeBERTaV3)
  g.tie = "embeddings"
  g.embedding_size = placeholder(int)  # tie=none: of its own tables; not set = its width
  g.init_from = placeholder(str)  # frozen: a run, or any source, that has the masked LM
  g.sampling_dropout = True  # False: samples from a second pass without dropout
  g.width_multiplier = 1 / 3  # of D, heads of 64, ffn 4 x width (Table 6: 1/3, small and large 1/4)
  g.depth_multiplier = 1.0  # of N; the paper's generators are narrow, not shallow (Section 3.2)

  c.objective = o = ConfigDict()
  o.name = "electra"  # a key of electra_jax.core.objectives.OBJECTIVES
  o.mask_prob = 0.15  # fraction of the tokens to predict (Table 6; large: 0.25)
  o.mask_token_prob = 0.85  # of those, the fraction shown as [MASK]; the rest is shown as it is
  o.temperature = 1.0  # divides the generator's logits for sampling only
  o.disallow_correct = False  # never sample the original token (no gain in the paper)
  o.unigram_share = 0.0  # of the samples, drawn by token frequency instead of by the generator
  o.mlm_weight = 1.0  # weight of the generator's loss (Section 3.3)
  o.discriminator_weight = 50.0  # weight of the main network's loss, lambda (Section 3.3)
  o.replace_mlm_weight = 1.0  # weight of the main network's word loss (electra_mlm, metro, coco_lm)
  o.adversarial_weight = 1.0  # weight of REINFORCE and its baseline (adversarial; Appendix F)
  # Weight of finding a sequence by its crop, and the crop by its sequence, in a group (coco_lm)
  o.contrast_weight = 1.0
  o.contrast_group = 8  # consecutive sequences of a group; divides a device's microbatch
  # Schedules for training, POSITION=VALUE,... in steps or % of the run, linear between points and a
  # jump where two have one position: "0%=0.3,100%=0.15". Evaluations use the fields above.
  o.mask_prob_schedule = ""
  o.temperature_schedule = ""
  o.unigram_share_schedule = ""  # "0=1,50%=0": easy replacements first
  # "1000=0,1000=50": the discriminator waits for the generator
  o.discriminator_weight_schedule = ""
  o.replace_mlm_weight_schedule = ""

  c.data = d = ConfigDict()
  d.dir = placeholder(str)  # folder of shards and manifest.json: build writes it, train reads it
  # What to build from, e.g. "text:/corpus/*.txt.zst@2,parquet:/c4/*.parquet#text"; @ gives a weight
  d.sources = "python-docs"
  d.tfds_dir = placeholder(str)  # data_dir of tensorflow_datasets for sources "tfds:..."
  d.vocab = "wordpiece"  # train wordpiece, unigram or bpe; or a vocab.txt, tokenizer.json, .model
  d.vocab_size = 30522  # entries when it is trained (BERT's size)
  d.vocab_train_mb = 200.0  # MB of text, spread over the corpus, that a vocabulary is trained on
  d.lowercase = True  # of a trained vocabulary or a vocab.txt; other files have their own rules
  # Remove accents, and with them vowels of Hindi and tones of Vietnamese. Not set: a trained
  # vocabulary keeps them; a vocab.txt strips them where it lower-cases, as BERT
  d.strip_accents = placeholder(bool)
  d.seq_length = 512  # tokens of an example L, special ones included (Table 6; small: 128)
  # segments = the paper's two-segment examples; packed = as many documents as fit, each by itself
  d.examples = "segments"
  d.split_lines = True  # segments: cut lines at ends of sentences; else long paragraphs lose tokens
  d.short_prob = 0.05  # chance that an example gets a random, shorter target length
  d.short_min_tokens = 5  # shortest such target, without special tokens
  d.single_segment_prob = 0.1  # chance that an example has one segment instead of two
  d.boundary_prob = 0.5  # chance that the sentence that overflows segment A still goes to it
  d.holdout_frac = 0.005  # share of documents, chosen by hash, for evaluation, never trained on
  d.max_bad_frac = 0.001  # share of documents that may be null or undecodable; they are skipped
  d.examples_per_shard = 100_000  # records in a shard file
  # A build is made of parts, ranges of the input files: one that is killed goes on, and processes
  # may share it. 0 = one for every 256 MiB of files. Another number gives other bytes
  d.parts = 0
  # exact: leave out documents whose text was seen before, but for case and white space
  d.dedup = ""
  d.workers = 0  # processes that tokenize; 0 = one per core (never changes the result)

  c.optimizer = p = ConfigDict()
  # electra_adam: no bias correction, as the original; adamw: optax's; muon: for the matrices of
  # hidden layers, and adamw for the rest
  p.name = "electra_adam"
  p.learning_rate = 2e-4  # (Table 6; small: 5e-4)
  # product: warm-up x decay, as the original; joined: warm up, then decay; wsd: warm up, stay, then
  # decay as 1 - sqrt in the last decay_steps
  p.schedule = "product"
  p.warmup_steps = 10_000  # steps of linear warm-up (Table 6)
  p.decay_power = 1.0  # of the polynomial decay to 0 at the last step
  p.decay_steps = 0  # the last ones, with wsd; the rate before does not depend on train.steps
  # Instead: share of the run that wsd decays in, of train.steps or with train.minutes of the time
  p.decay_frac = placeholder(float)
  p.weight_decay = 0.01  # decoupled, times the learning rate; not on biases and LayerNorm (Table 6)
  p.b1 = 0.9  # decay of the gradient's mean (Table 6); of Muon's matrices it is 0.95
  p.b2 = 0.999  # decay of the gradient's square (Table 6)
  p.eps = 1e-6  # outside the root (Table 6)
  p.clip_norm = 1.0  # of the gradient over both networks (the original's code)
  # ZeRO-1: each device keeps and updates its part of the moments of every weight; the bytes sent
  # stay the same. Checkpoints do not depend on it
  p.sharded = False
  # True: each network has an optimizer: its own norm to clip, and what the next fields set
  p.separate_optimizers = False
  p.generator_learning_rate = placeholder(float)  # not set = learning_rate
  p.generator_weight_decay = placeholder(float)  # not set = weight_decay
  p.generator_clip_norm = placeholder(float)  # not set = clip_norm

  c.train = t = ConfigDict()
  t.batch_size = 256  # sequences in a step, over all devices and hosts (Table 6)
  t.steps = 766_000  # optimizer steps; the schedule ends here (Table 6)
  # Wall-clock minutes of the run, from the program's start to its end, over all its starts: the
  # rate stays (schedule=wsd) until what is left is the decay's share. Not set: steps alone count
  t.minutes = placeholder(float)
  # Microbatches a device splits its share into: the same update with less memory. On a CPU faster
  # too: 1,024 tokens at a time (8 x 128) fit its caches.
  t.accumulation = 1

  c.eval = e = ConfigDict()
  e.every_steps = 10_000  # steps between evaluations on held-out documents; 0 = only at the end
  e.batch_size = 256  # sequences
  e.max_examples = 4096  # held-out sequences to use, at most
  e.pairs = placeholder(str)  # file of minimal pairs (`electra_jax.evaluate pairs`); not set: none
  e.max_pairs = 2000  # pairs to use, at most, evenly spaced
  # Also detect replacements drawn by token frequency, which are the same for every run: unigram_auc
  e.fixed_noise = True

  c.checkpoint = k = ConfigDict()
  k.every_steps = 1000  # steps between checkpoints (the original's)
  k.keep = 5  # newest checkpoints kept (the original's); one more stays until the next save
  k.keep_every_steps = 100_000  # checkpoints at multiples of this are kept for ever; 0 = none
  k.fallback = False  # True: a damaged newest checkpoint is set aside and the one before is taken
  # stop or continue where a checkpoint or a line of the log cannot be written, as on a full disk
  k.on_error = "stop"

  c.health = h = ConfigDict()
  h.on_nan = "stop"  # or rollback: go back to the newest checkpoint and leave that batch out
  h.max_rollbacks = 3  # in a run; the NaN after these stops it
  h.on_warning = "warn"  # or stop: save and end the run at a warning
  # Log lines that a collapse lasts; a loss is compared with the median of as many, at least of 5
  h.window = 20
  # A loss above this times that median, beyond its noise and, for a discriminator, above log 2;
  # 0 = off, as in the next three
  h.loss_spike = 1.1
  h.auc_margin = 0.02  # the discriminator's AUC within this of 0.5: it guesses
  h.recall = 0.001  # it finds less than this share of replaced tokens: always "original"
  h.entropy_ratio = 0.5  # the generator's entropy below this times its loss; 1 if calibrated
  # A band of healthy seeds (configs/bands/*.json, `report --make-band`): warn where it is left
  h.reference = placeholder(str)
  # Collapses are looked for after this many steps (twice the warm-up), counted again from where a
  # schedule gives detection a weight, or the temperature is 1 again
  h.after_step = 20_000

  c.hosts = ConfigDict()
  c.hosts.timeout_secs = 300  # how long the processes of a run wait for one that does not come
  c.hosts.slow_ratio = 1.3  # warn about a process whose step time is this times the others'

  c.profile = ConfigDict()
  c.profile.steps = ""  # FIRST:LAST, steps to trace for xprof into WORKDIR/profile
  c.profile.signal_steps = 5  # steps to trace on SIGUSR2

  c.log = ConfigDict()
  c.log.every_steps = 100  # steps between lines
  # Where the lines go besides metrics.jsonl: tensorboard, wandb, mlflow, separated by commas. Each
  # is an extra; wandb and mlflow read their own environment variables
  c.log.trackers = "tensorboard"
  return c
