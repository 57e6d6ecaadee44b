"""Makes the golden files: tiny random networks of transformers, and what they say.

  python tests/golden/make.py    # needs torch and transformers

Each folder is one of Hugging Face's own, with its logits on fixed inputs beside it.
"""

from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
SIZES = dict(
  vocab_size=50,
  embedding_size=8,
  hidden_size=12,
  num_hidden_layers=2,
  num_attention_heads=3,
  intermediate_size=20,
  max_position_embeddings=10,
  initializer_range=0.3,
)


def main() -> None:
  import torch
  from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

  for name, kind in (("discriminator", ElectraForPreTraining), ("generator", ElectraForMaskedLM)):
    torch.manual_seed(len(name))
    network = kind(ElectraConfig(**SIZES)).eval()
    for weight in network.parameters():  # biases and LayerNorms too: none is lost unseen
      weight.data += 0.1 * torch.randn_like(weight)
    ids = torch.randint(5, 50, (3, 10))
    segments = (torch.arange(10) > 5).long().expand(3, -1)
    mask = torch.arange(10) < torch.tensor([[10], [7], [3]])
    with torch.no_grad():
      logits = network(input_ids=ids, attention_mask=mask.long(), token_type_ids=segments).logits
    network.save_pretrained(HERE / name)
    arrays = {"ids": ids, "segments": segments, "mask": mask, "logits": logits}
    np.savez_compressed(HERE / name / "said.npz", **{k: v.numpy() for k, v in arrays.items()})


if __name__ == "__main__":
  main()
