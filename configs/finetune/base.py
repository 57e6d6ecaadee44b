"""Every field of fine-tuning; glue.py, squad.py, tagging.py, pairs.py and own.py change some.

Command:  python -m electra_jax.finetune --config=configs/finetune/glue.py:mrpc
          --config.init=RUN_OR_EXPORT --config.data.dir=GLUE --workdir=DIR
Facts:    Clark et al. 2020, Appendix B and Table 7, and the original's code.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` (the part after the colon) is not used here."""
  if arg:
    raise ValueError(f"the configuration takes no argument, got {arg!r}")
  c = ConfigDict()
  c.kind = "text"  # text, tagging, qa or pairs: which of the groups below holds the task
  c.task = ""  # its name; for GLUE several, separated by commas
  # What to start from: a run, an orbax export, a folder of Hugging Face, hf://ORG/NAME[@REVISION]
  # or a TF1 checkpoint; or "random": the control, fresh weights in the shape of `like`
  c.init = placeholder(str)
  c.like = placeholder(str)  # with init=random: the source whose shape and vocabulary to take
  c.seed = 0  # the first of the seeds: of the head, the order of the examples, dropout
  c.seeds = 5  # how many are trained, in one compiled program (the paper's medians are of 10)
  c.keep = "best"  # which seeds' networks are kept: best on the first dev split, all or none

  c.data = d = ConfigDict()
  d.dir = placeholder(str)  # text: folder with the tasks' folders or the task's files, or tfds:NAME
  d.tfds_dir = placeholder(str)  # data_dir of tensorflow_datasets
  d.train = placeholder(str)  # tagging, qa, pairs, a text task of your own: file to train on
  d.dev = placeholder(str)  # likewise: file with labels to measure on
  d.test = placeholder(str)  # likewise: file to predict, labels or not; pairs: likewise dev
  d.vocab = placeholder(str)  # vocabulary file where the source has none (TF1 checkpoints)
  d.lowercase = True  # of that file, if it is a vocab.txt
  d.max_length = 128  # tokens at most, special ones included (the original's)
  # Lengths that are compiled; 1: a task's rows are padded to its longest, 0: every task's rows are
  # padded to max_length, so that tasks of one kind and number of classes share what is compiled
  d.buckets = 4
  d.train_examples = placeholder(int)  # use this many of the training examples; not set = all

  c.own = o = ConfigDict()  # a text task of your own, see own.py
  o.text = placeholder(str)  # column, or field of JSON lines, with the text
  o.pair = placeholder(str)  # column with the second text, if there is one
  o.label = placeholder(str)  # column with the label
  o.kind = "classification"  # or regression
  # Comma-separated, the main one first: accuracy, f1 (of the second of two classes in sorted order;
  # for more classes the mean), mcc; spearman, pearson
  o.metrics = ""
  # For every kind of task: this share of data.train, or of the one file in data.dir, is the dev
  # split, by a hash of the (first) text, words or context: equal texts stay together; 0: none
  o.split = 0.0
  o.folds = 0  # likewise, cross-validation: each of so many parts is the dev split once; 0: none
  o.fold = placeholder(int)  # the one of the folds to train, from 0; not set = all

  c.tagging = t = ConfigDict()
  t.word_column = 0
  t.tag_column = -1  # counted from the end where negative

  c.qa = q = ConfigDict()
  q.stride = 128  # tokens between the starts of a context's windows (the original's doc_stride)
  q.max_query = 64  # tokens of a question, the rest is cut (the original's)
  q.beam_size = 20  # starts, and ends of each, that are considered (the original's)
  # Whether the end depends on the start (the original's); not set = with model.head=linear
  q.joint = placeholder(bool)
  # Of the answerability loss, 0 = no such classifier; not set = 0.5 (the original's) if joint, or 0
  q.answerable_weight = placeholder(float)
  q.hidden = 512  # inner width of the end's predictor and of the classifier (the original's)
  q.n_best = 20  # answers a question in nbest.json (the original's)
  q.max_answer_length = 30  # tokens (the original's)
  # SQuAD 2.0: null odds above it mean no answer; not set = -2.75 (the original's) or, without the
  # classifier, 0
  q.threshold = placeholder(float)

  c.pairs = r = ConfigDict()  # text embeddings, see pairs.py
  # Comma-separated; not set = all columns of the file, in their order
  r.train_columns = placeholder(str)  # anchor, positive and, if there are, hard negatives
  r.dev_columns = placeholder(str)  # two texts and their score; a query and its answer
  r.pooling = "mean"  # of the last states of a text's tokens, or cls: the state of [CLS]
  r.temperature = 0.05  # that divides cosines in the loss (1 / scale in sentence-transformers)

  c.model = m = ConfigDict()
  # auto: transformers' for the network; linear: the paper's; two_layers: of transformers' ELECTRA,
  # for texts; modernbert: of its ModernBERT; mean, modernbert_mean: linear and modernbert on the
  # mean of a text's tokens instead of [CLS]
  m.head = "auto"
  m.dropout = 0.1  # (Table 7)
  m.embedding_dropout = placeholder(float)  # not set = the source's, or dropout if it has none
  m.ffn_dropout = placeholder(float)  # of the feed-forward output; not set = likewise
  m.attention_dropout = 0.1  # (Table 7)
  m.dtype = "auto"  # compute: float32, bfloat16, or auto = bfloat16 on accelerators, float32 on CPU
  m.attention = "auto"  # xla, cudnn, or auto = cudnn on a GPU where it can, else xla
  m.unroll = 0  # layers compiled in a row; 0: all on a GPU, else the fewest
  m.remat = False  # recompute each block in the backward pass: less memory, a third more FLOPs

  c.optimizer = p = ConfigDict()
  p.name = "electra_adam"  # electra_adam: no bias correction, as the original; adamw: optax's
  # Not set = by the network's width: 1e-3 up to 128 (measured on chunking, where 2e-3 was better
  # still), 3e-4 up to 256, 1e-4 up to 768, 5e-5 above (the paper's; its code has 1e-4 for small)
  p.learning_rate = placeholder(float)
  # Learning rate of a layer over the layer above's; not set = the paper's: 0.8, large 0.9
  p.layer_decay = placeholder(float)
  p.layer_decay_skip = False  # True: the original's code, whose top layer has layer_decay squared
  # product: warm-up x decay, as the original; joined: warm up, then decay; wsd: warm up, stay, then
  # decay as 1 - sqrt in the last decay_frac
  p.schedule = "product"
  p.warmup_frac = 0.1  # of the steps (Table 7)
  p.decay_power = 1.0  # of the polynomial decay to 0 at the last step
  p.decay_frac = placeholder(float)  # of the steps, with wsd
  p.weight_decay = 0.0  # (Table 7; the original's code has 0.01)
  p.b1 = 0.9  # decay of the gradient's mean (Table 7)
  p.b2 = 0.999  # decay of the gradient's square (Table 7)
  p.eps = 1e-6  # outside the root (Table 7)
  p.clip_norm = 1.0  # of the gradient of the loss summed over the batch (the original's code)

  c.train = ConfigDict()
  c.train.batch_size = 32  # examples in a step, over all devices (Table 7)
  c.train.epochs = placeholder(float)  # not set = the paper's: RTE, STS-B 10, SQuAD 2, others 3
  c.train.accumulation = 1  # microbatches a device splits its share into: less memory
  # Evaluations of the first dev split without a better main metric after which a seed stops, with
  # the best one's network; the rate decays over all epochs. Not set = the network after them
  c.train.patience = placeholder(int)

  c.eval = ConfigDict()
  c.eval.batch_size = 32  # examples
  c.eval.every_steps = placeholder(int)  # steps between those of patience; not set = an epoch's

  c.log = ConfigDict()
  c.log.every_steps = 100  # steps between lines
  return c
