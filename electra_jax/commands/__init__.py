"""The commands, one module each with `add_options(parser)` and `main(args)`.

Start one with `electra-jax NAME` or `python -m electra_jax NAME`. Slow imports wait until the
options are parsed.
"""

# {name: what it does}
COMMANDS = {
  "quickstart": "builds, trains, shows and reports, in minutes on two cores",
  "config": "prints the fields of a configuration",
  "build": "builds shards of training examples from text",
  "preflight": "estimates a step's memory and time on TPUs and GPUs",
  "flops": "counts the FLOPs of a step and of a run",
  "train": "pretrains, or resumes a run",
  "show": "shows what a network has learned, on its held-out text or yours",
  "evaluate": "measures a pretrained network in minutes",
  "experiment": "compares configurations at equal FLOPs, steps or minutes",
  "finetune": "fine-tunes on tasks, compares results, predicts",
  "score": "prints the pseudo-log-likelihoods of sentences",
  "report": "writes a page about runs, or a band of healthy runs",
  "export": "writes networks for Hugging Face or fine-tuning",
}
