"""ELECTRA-Base as in the paper (Clark et al. 2020, Table 6), and the default of every field.

Command:  python -m electra_jax.train --config=configs/base.py --workdir=DIR
          --config.data.dir=SHARDS
Hardware: 16 TPUv3 for four days in the paper; small.py and quickstart.py need less.
Expected: GLUE dev average 85.1 after fine-tuning (paper, Table 1).

The other files change some of these fields.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` (the part after the colon) must be empty."""
  if arg:
    raise ValueError(f"the configuration takes no argument, got {arg!r}")
  c = ConfigDict()
  c.seed = 0  # of the initial weights, the order of the data, masks, samples and dropout
  # Load the weights from a run's workdir, an orbax export, a Hugging Face folder,
  # hf://ORG/NAME[@REVISION] or a TF1 checkpoint of the original, and start a new optimizer. Unset
  # fields of model and generator are taken from it
  c.init_from = placeholder(str)
  c.init_step = placeholder(int)  # step of that run's checkpoint; not set: the newest
  # Also load that run's optimizer state, for another phase with a new sequence length, batch size,
  # learning rate or objective: the moments of the weights that both runs have. Steps count from 0;
  # set another seed, or the run repeats the order of the data
  c.init_optimizer = False
  c.allow_config_change = ""  # fields (comma-separated) that may differ from the run being resumed

  # The main network: the discriminator, or BERT. Its kinds of layers are BERT's; modern.py has
  # ModernBERT's
  c.model = m = ConfigDict()
  m.hidden_size = 768  # width D (Table 6)
  m.num_layers = 12  # blocks N (Table 6)
  m.num_heads = 12  # heads H; D / H = 64 in every model of the paper
  m.ffn_size = 3072  # inner width of the feed-forward layer, 4 D (Table 6)
  m.embedding_size = 768  # width E of the embedding tables; projected to D if different (Table 6)
  m.max_positions = 512  # longest sequence; rows of the position table
  m.dropout = 0.1  # rate on the embeddings and on both sublayer outputs of a block (Table 6)
  m.attention_dropout = 0.1  # rate on attention probabilities (Table 6)
  m.init_stddev = 0.02  # standard deviation of the truncated normal initialisation (BERT)
  m.layer_norm_eps = 1e-12  # added to the variance (BERT)
  m.block = "post_norm"  # post_norm, or pre_norm with a final norm
  m.norm = "layer_norm"  # layer_norm, layer_norm_no_bias or rms_norm
  m.feed_forward = "gelu"  # gelu, or the gated geglu and swiglu
  m.positions = "learned"  # learned (a table), rope (rotary) or disentangled (DeBERTa)
  m.position_buckets = 256  # disentangled: half the rows of the table of distances
  m.rope_theta = 10_000.0  # RoPE base of the layers that attend to all tokens
  m.local_rope_theta = 10_000.0  # RoPE base of the layers that attend to a window
  m.global_every = 1  # 3: layers 0, 3, 6, ... attend to all tokens, the others to a window
  m.window = 128  # size of the window in tokens: window / 2 on each side
  m.biases = True  # of dense layers; layers that return logits always have them
  m.token_types = True  # embed whether a token is in segment A or B
  m.qk_norm = False  # normalise the queries and keys of each head
  m.embedding_norm = True  # normalise the sum of the embeddings
  m.first_norm = True  # pre_norm: normalise the input of the first block
  m.scaled_init = False  # init_stddev / sqrt(2 N) for a block's two output layers (Megatron)
  m.embedding_dropout = placeholder(float)  # rate on the embeddings; not set: dropout
  m.ffn_dropout = placeholder(float)  # rate on the feed-forward output; not set: dropout
  m.head_norm = False  # normalise the hidden layer of the replaced-token detection head
  m.head_first_token = False  # its input is the sum of a token's and the first token's state
  m.dtype = "auto"  # compute: float32, bfloat16, or auto (float32 on CPUs, else bfloat16)
  m.attention = "auto"  # xla, cudnn, splash (TPU), or auto (cudnn where supported, else xla)
  m.unroll = 0  # layers per loop iteration, at least global_every; 0: all on a GPU, else the fewest
  m.remat = False  # recompute each block in the backward pass: less memory, a third more FLOPs

  c.generator = g = ConfigDict()
  # transformer: the paper's; enhanced_mask_decoder: DeBERTa's, whose last layer adds absolute
  # positions; two_tower: two causal transformers on the clean text (Electric); uniform or unigram:
  # no network; frozen: a trained masked language model (init_from); frozen_mask_decoder: DeBERTa's
  g.kind = "transformer"
  # Weights shared with the discriminator: none, tokens, embeddings (Section 3.2), all (equal sizes)
  # or gdes, gradient-disentangled embedding sharing (DeBERTaV3)
  g.tie = "embeddings"
  g.embedding_size = placeholder(int)  # width of its tables with tie=none; not set: its hidden size
  g.init_from = placeholder(str)  # frozen...: a run or other source with the masked language model
  g.sampling_dropout = True  # False: sample in a second pass without dropout
  g.width_multiplier = 1 / 3  # of D, heads of 64, ffn 4 x width (Table 6: 1/3, small and large 1/4)
  g.depth_multiplier = 1.0  # of N; the paper's generators are narrow, not shallow (Section 3.2)

  c.objective = o = ConfigDict()
  o.name = "electra"  # a key of electra_jax.core.objectives.OBJECTIVES
  o.mask_prob = 0.15  # fraction of the tokens to predict (Table 6; large: 0.25)
  o.whole_words = False  # mask all tokens of a word or none
  o.mask_token_prob = 0.85  # fraction of these replaced by [MASK]; the others stay unchanged
  o.temperature = 1.0  # divides the generator's logits in sampling, not in its loss
  o.disallow_correct = False  # never sample the original token (no gain in the paper)
  o.unigram_share = 0.0  # fraction of the samples drawn by token frequency, not by the generator
  # Fraction of the chosen tokens that the main network reads as [MASK], not as a sample
  o.keep_mask_share = 0.0
  o.mlm_weight = 1.0  # weight of the generator's loss (Section 3.3)
  o.discriminator_weight = 50.0  # weight of the main network's loss, lambda (Section 3.3)
  o.replace_mlm_weight = 1.0  # weight of the main network's LM loss (electra_mlm, metro, coco_lm)
  o.adversarial_weight = 1.0  # weight of REINFORCE and its baseline (adversarial; Appendix F)
  o.contrast_weight = 1.0  # weight of the contrastive loss of a sequence and its crop (coco_lm)
  o.contrast_group = 8  # consecutive sequences to contrast; must divide a device's microbatch
  # Schedules in training: POSITION=VALUE,... in steps or % of the run, e.g. "0%=0.3,100%=0.15";
  # linear between points, a jump at two equal positions. Evaluations use the fields above
  o.mask_prob_schedule = ""
  o.temperature_schedule = ""
  o.unigram_share_schedule = ""  # e.g. "0=1,50%=0": easy replacements first
  # e.g. "1000=0,1000=50": train the generator alone for 1,000 steps
  o.discriminator_weight_schedule = ""
  o.replace_mlm_weight_schedule = ""

  c.data = d = ConfigDict()
  # Folder of shards and manifest.json, written by build and read by train; may be s3:// or gs://,
  # for train also https:// or hf://datasets/. Train copies a URL's shards to data.cache first
  d.dir = placeholder(str)
  d.cache = placeholder(str)  # host's folder for copies; not set: ~/.cache/electra_jax/shards
  # Text to build from, e.g. "text:/corpus/*.txt.zst@2,parquet:/c4/*.parquet#text"; @ sets a weight
  d.sources = "python-docs"
  d.tfds_dir = placeholder(str)  # data_dir of tensorflow_datasets for sources "tfds:..."
  d.vocab = "wordpiece"  # wordpiece, unigram or bpe to train one; or a .txt, .json or .model file
  d.vocab_size = 30522  # size of a trained vocabulary (BERT's)
  d.vocab_train_mb = 200.0  # MB of text, spread over the corpus, to train the vocabulary on
  d.lowercase = True  # lower-case text for a trained vocabulary or a vocab.txt; others decide it
  # Strip accents, which also strips vowels of Hindi and tones of Vietnamese. Not set: False for a
  # trained vocabulary; for a vocab.txt the value of lowercase, as in BERT
  d.strip_accents = placeholder(bool)
  # Compose characters (NFC): e and a combining accent are read as é. Not set: True for a trained
  # vocabulary; for a file as in the manifest beside it, else False
  d.nfc = placeholder(bool)
  d.seq_length = 512  # tokens of an example L, including special ones (Table 6; small: 128)
  # segments: the paper's two-segment examples; packed: several documents in a row, attention stays
  # inside each
  d.examples = "segments"
  d.split_lines = True  # segments: split lines into sentences; else long paragraphs lose tokens
  d.short_prob = 0.05  # probability that an example gets a random, shorter target length
  d.short_min_tokens = 5  # minimum of a short target length, without special tokens
  d.single_segment_prob = 0.1  # probability that an example has one segment instead of two
  d.boundary_prob = 0.5  # probability that a sentence that overflows segment A still goes to it
  d.holdout_frac = 0.005  # fraction of the documents, chosen by hash, held out for evaluation
  d.max_bad_frac = 0.001  # fraction of null or undecodable documents to tolerate; they are skipped
  d.examples_per_shard = 100_000  # records in a shard file
  # Number of parts (ranges of the input files), which a build can resume from and processes can
  # share; 0: one per 256 MiB. Another number gives other shards
  d.parts = 0
  d.dedup = ""  # exact: drop documents equal to an earlier one but for case and white space
  d.workers = 0  # processes that tokenize; 0: one per core. Never changes the result

  c.optimizer = p = ConfigDict()
  # electra_adam: Adam without bias correction, as the original; adamw: optax's; muon: Muon for the
  # matrices of hidden layers, AdamW for the rest
  p.name = "electra_adam"
  p.learning_rate = 2e-4  # peak (Table 6; small: 5e-4)
  # product: warm-up x decay, as the original; joined: warm-up, then decay; wsd: warm-up, constant,
  # then 1 - sqrt decay
  p.schedule = "product"
  p.warmup_steps = 10_000  # steps of linear warm-up (Table 6)
  p.decay_power = 1.0  # power of the polynomial decay to 0 at the last step
  p.decay_steps = 0  # length of wsd's decay; the rate before it does not depend on train.steps
  # Alternative to decay_steps: length of wsd's decay as a fraction of train.steps or train.minutes
  p.decay_frac = placeholder(float)
  p.weight_decay = 0.01  # decoupled, times the learning rate; not on biases and LayerNorm (Table 6)
  p.b1 = 0.9  # decay of the gradient's mean (Table 6); Muon's momentum is 0.95
  p.b2 = 0.999  # decay of the gradient's square (Table 6)
  p.eps = 1e-6  # added outside the root (Table 6)
  # Maximum gradient norm, over all trained weights, or per network with separate_optimizers
  p.clip_norm = 1.0
  # ZeRO-1: shard the optimizer state over the devices. Communication and checkpoints do not change
  p.sharded = False
  # Optimize the two networks separately: each is clipped by its norm, and the next fields apply
  p.separate_optimizers = False
  p.generator_learning_rate = placeholder(float)  # not set: learning_rate
  p.generator_weight_decay = placeholder(float)  # not set: weight_decay
  p.generator_clip_norm = placeholder(float)  # not set: clip_norm

  c.train = t = ConfigDict()
  t.batch_size = 256  # sequences in a step, over all devices and hosts (Table 6)
  t.steps = 766_000  # optimizer steps; the schedule ends here (Table 6)
  # Limit on the run's wall-clock minutes, summed over restarts; needs schedule=wsd, which decays in
  # the last decay_frac of them. Not set: only train.steps counts
  t.minutes = placeholder(float)
  # Microbatches of a device: the same update with less memory. Also faster on a CPU, whose caches
  # hold about 1,024 tokens (8 x 128)
  t.accumulation = 1

  c.eval = e = ConfigDict()
  e.every_steps = 10_000  # steps between evaluations on held-out documents; 0: only at the end
  e.batch_size = 256  # sequences
  e.max_examples = 4096  # maximum number of held-out sequences
  e.pairs = placeholder(str)  # file of minimal pairs (`electra_jax.evaluate pairs`); not set: none
  e.max_pairs = 2000  # maximum number of pairs, evenly spaced
  # Also report unigram_auc, for replacements drawn by token frequency, which are equal for all runs
  e.fixed_noise = True

  c.checkpoint = k = ConfigDict()
  k.every_steps = 1000  # steps between checkpoints (the original's)
  k.keep = 5  # newest checkpoints to keep (the original's); one more stays until the next save
  k.keep_every_steps = 100_000  # keep checkpoints at multiples of this for ever; 0: none
  k.fallback = False  # True: set a damaged newest checkpoint aside and load the one before it
  # stop or continue if a checkpoint or a log line cannot be written, e.g. on a full disk
  k.on_error = "stop"

  c.health = h = ConfigDict()
  h.on_nan = "stop"  # or rollback: load the newest checkpoint and skip the batch that gave the NaN
  h.max_rollbacks = 3  # per run; the next NaN stops it
  h.on_warning = "warn"  # or stop: save and end the run at a warning
  # Log lines that a collapse must last, and that the median for loss_spike covers (at least 5)
  h.window = 20
  # Warn of a loss above this times the median, beyond its noise and, for a discriminator, above
  # log 2; 0 turns this check and each of the next three off
  h.loss_spike = 1.1
  h.auc_margin = 0.02  # warn of a discriminator AUC within this of 0.5: it guesses
  h.recall = 0.001  # warn of a discriminator that finds less than this fraction of replaced tokens
  h.entropy_ratio = 0.5  # warn of a generator entropy below this times its loss (1 if calibrated)
  # Warn outside of this band of healthy runs (configs/bands/*.json, `report --make-band`)
  h.reference = placeholder(str)
  # Steps before collapses are checked (twice the warm-up), counted again from the step where a
  # schedule gives detection a weight or returns the temperature to 1
  h.after_step = 20_000

  c.hosts = ConfigDict()
  c.hosts.timeout_secs = 300  # how long processes of a run wait for a missing one
  c.hosts.slow_ratio = 1.3  # warn of a process whose step takes this times as long as the others'

  c.profile = ConfigDict()
  c.profile.steps = ""  # FIRST:LAST, steps to trace for xprof into WORKDIR/profile
  c.profile.signal_steps = 5  # steps to trace on SIGUSR2

  c.log = ConfigDict()
  c.log.every_steps = 100  # steps between lines
  # Trackers besides metrics.jsonl, comma-separated: tensorboard, wandb, mlflow. Each is an extra of
  # the package; wandb and mlflow read their environment variables
  c.log.trackers = "tensorboard"
  return c
