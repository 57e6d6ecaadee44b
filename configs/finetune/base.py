"""Every field of fine-tuning; glue.py, squad.py, tagging.py, pairs.py and own.py change some.

Command:  python -m electra_jax.finetune --config=configs/finetune/glue.py:mrpc
          --config.init=RUN_OR_EXPORT --config.data.dir=GLUE --workdir=DIR
Facts:    Clark et al. 2020, Appendix B and Table 7, and the original's code.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` (the part after the colon) must be empty."""
  if arg:
    raise ValueError(f"the configuration takes no argument, got {arg!r}")
  c = ConfigDict()
  c.kind = "text"  # text, tagging, qa or pairs
  c.task = ""  # name of the task; for GLUE one or more, comma-separated
  # Network to fine-tune: a run, an orbax export, a Hugging Face folder, hf://ORG/NAME[@REVISION] or
  # a TF1 checkpoint; or "random": a control with random weights in the shape of `like`
  c.init = placeholder(str)
  c.like = placeholder(str)  # init=random: the network whose shape and vocabulary to use
  c.seed = 0  # first seed, of the head's initial weights, the order of the examples and dropout
  c.seeds = 5  # number of seeds, trained in one compiled program (the paper's medians are of 10)
  c.keep = "best"  # networks to keep: best (on the first dev split), all or none

  c.data = d = ConfigDict()
  d.dir = placeholder(str)  # text: folder with the tasks' folders or the task's files, or tfds:NAME
  d.tfds_dir = placeholder(str)  # data_dir of tensorflow_datasets
  d.train = placeholder(str)  # all tasks but GLUE: training file
  d.dev = placeholder(str)  # all tasks but GLUE: file with labels to evaluate on
  d.test = placeholder(str)  # all tasks but GLUE: file to predict, with or without labels
  d.vocab = placeholder(str)  # vocabulary file of a network without one (TF1 checkpoints)
  d.lowercase = True  # lower-case text for that file, if it is a vocab.txt
  d.max_length = 128  # maximum number of tokens, including special ones (the original's)
  # Number of compiled lengths. 1: pad a task's rows to its longest; 0: pad all rows to max_length,
  # so that tasks of one kind and number of classes share compiled programs
  d.buckets = 4
  d.train_examples = placeholder(int)  # number of training examples to use; not set: all

  c.own = o = ConfigDict()  # a text task of your own, see own.py
  o.text = placeholder(str)  # column, or field of JSON lines, with the text
  o.pair = placeholder(str)  # column with the second text, if any
  o.label = placeholder(str)  # column with the label
  o.kind = "classification"  # or regression
  # Comma-separated, the main one first: accuracy, f1 (of the second of two sorted classes; the mean
  # of more), mcc; spearman, pearson
  o.metrics = ""
  # Every kind of task: fraction of data.train (or of the only file in data.dir) used as dev split,
  # by hash of the (first) text, words or context, so that equal texts stay together; 0: none
  o.split = 0.0
  o.folds = 0  # every kind of task: number of folds of a cross-validation; 0: none
  o.fold = placeholder(int)  # the fold to train alone, from 0; not set: all

  c.tagging = t = ConfigDict()
  t.word_column = 0
  t.tag_column = -1  # negative: counted from the end
  t.labels = placeholder(str)  # comma-separated names of tags that are integers from 0

  c.qa = q = ConfigDict()
  q.stride = 128  # tokens between the starts of a context's windows (the original's doc_stride)
  q.max_query = 64  # maximum number of tokens of a question, truncated beyond (the original's)
  q.beam_size = 20  # starts to consider, and ends for each (the original's)
  # Predict the end given the start (the original's); not set: True with model.head=linear
  q.joint = placeholder(bool)
  # Weight of the answerability loss; 0: no classifier; not set: 0.5 (the original's) if joint, or 0
  q.answerable_weight = placeholder(float)
  q.hidden = 512  # inner width of the end predictor and of the classifier (the original's)
  q.n_best = 20  # answers for each question in nbest.json (the original's)
  q.max_answer_length = 30  # tokens (the original's)
  # SQuAD 2.0: null odds above which a question has no answer; not set: -2.75 (the original's), or 0
  # without the classifier
  q.threshold = placeholder(float)

  c.pairs = r = ConfigDict()  # text embeddings, see pairs.py
  # Comma-separated: anchor, positive and optional hard negatives; not set: all columns, in order
  r.train_columns = placeholder(str)
  r.dev_columns = placeholder(str)  # two texts and their score, or a query and its answer
  r.pooling = "mean"  # mean of the last states of a text's tokens, or cls: the state of [CLS]
  r.temperature = 0.05  # divides cosines in the loss (1 / scale in sentence-transformers)

  c.model = m = ConfigDict()
  # auto: transformers' head for the network; linear: the paper's; two_layers: transformers' ELECTRA
  # head for texts; modernbert: its ModernBERT head; mean, modernbert_mean: linear and modernbert on
  # the mean of a text's tokens instead of [CLS]
  m.head = "auto"
  m.dropout = 0.1  # (Table 7)
  m.embedding_dropout = placeholder(float)  # not set: the network's, or dropout if it has none
  m.ffn_dropout = placeholder(float)  # of the feed-forward output; not set: as embedding_dropout
  m.attention_dropout = 0.1  # (Table 7)
  m.dtype = "auto"  # compute: float32, bfloat16, or auto (float32 on CPUs, else bfloat16)
  m.attention = "auto"  # xla, cudnn, or auto (cudnn where supported, else xla)
  m.unroll = 0  # layers per loop iteration; 0: all on a GPU, else the fewest
  m.remat = False  # recompute each block in the backward pass: less memory, a third more FLOPs

  c.optimizer = p = ConfigDict()
  # electra_adam: Adam without bias correction, as the original; adamw: optax's
  p.name = "electra_adam"
  # Not set: by the network's width, 1e-3 up to 128 (chunking: 2e-3 was better still), 3e-4 up to
  # 256, 1e-4 up to 768, 5e-5 above (the paper's; its code has 1e-4 for small)
  p.learning_rate = placeholder(float)
  # Learning rate of a layer relative to the layer above; not set: the paper's 0.8, large 0.9
  p.layer_decay = placeholder(float)
  p.layer_decay_skip = False  # True: layer_decay squared for the top layer, as the original's code
  # product: warm-up x decay, as the original; joined: warm-up, then decay; wsd: warm-up, constant,
  # then 1 - sqrt decay
  p.schedule = "product"
  p.warmup_frac = 0.1  # fraction of the steps (Table 7)
  p.decay_power = 1.0  # power of the polynomial decay to 0 at the last step
  p.decay_frac = placeholder(float)  # length of wsd's decay as a fraction of the steps
  p.weight_decay = 0.0  # (Table 7; the original's code has 0.01)
  p.b1 = 0.9  # decay of the gradient's mean (Table 7)
  p.b2 = 0.999  # decay of the gradient's square (Table 7)
  p.eps = 1e-6  # added outside the root (Table 7)
  p.clip_norm = 1.0  # maximum norm of the gradient of the batch's summed loss (the original's code)

  c.train = ConfigDict()
  c.train.batch_size = 32  # examples in a step, over all devices (Table 7)
  c.train.epochs = placeholder(float)  # not set: the paper's, RTE and STS-B 10, SQuAD 2, others 3
  c.train.accumulation = 1  # microbatches of a device: the same update with less memory
  # Stop a seed after this many evaluations of the first dev split without a better main metric, and
  # keep its best network. The rate decays over all epochs. Not set: keep the last network
  c.train.patience = placeholder(int)

  c.eval = ConfigDict()
  c.eval.batch_size = 32  # examples
  c.eval.every_steps = placeholder(int)  # steps between evaluations of patience; not set: an epoch

  c.log = ConfigDict()
  c.log.every_steps = 100  # steps between lines
  return c
