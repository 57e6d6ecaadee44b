"""Data sheets of NVIDIA GPUs and their hosts, and the descriptions that XLA needs.

Peaks are in `flops.PEAK_FLOPS`. AMD GPUs are missing because JAX's ROCm plugin (0.10.2) needs an
AMD GPU and the ROCm libraries.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Gpu:
  """A kind of GPU."""

  kind: str  # its key in `flops.PEAK_FLOPS`
  memory: float  # bytes, as the driver reports them
  memory_rate: float  # bytes/s
  link_rate: float  # bytes/s to the other GPUs of its host, in one direction
  network_rate: float  # bytes/s per GPU to other hosts, in one direction
  capability: tuple[int, int]  # of CUDA
  device: dict[str, float]  # fields of XLA's device description
  per_host: int = 8

  def links(self, axes: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
    """Returns (number of members, bytes/s of each) for each level of communication.

    A host is one member, which sends over the network adapters of all its GPUs at once.
    """
    hosts, count = axes
    return ((count, self.link_rate), (hosts, count * self.network_rate))


_BLOCK = {  # common to the GPUs below
  "threads_per_block_limit": 1024,
  "threads_per_warp": 32,
  "shared_memory_per_block": 49152,
  "block_dim_limit_x": 2147483647,
  "block_dim_limit_y": 65535,
  "block_dim_limit_z": 65535,
  "registers_per_core_limit": 65536,
  "registers_per_block_limit": 65536,
}
_HOPPER = {
  "core_count": 132,
  "fpus_per_core": 128,
  "clock_rate_ghz": 1.98,
  "l2_cache_size": 52428800,
  "threads_per_core_limit": 2048,
  "shared_memory_per_core": 233472,
  "shared_memory_per_block_optin": 232448,
}
_BLACKWELL = _HOPPER | {"core_count": 148, "clock_rate_ghz": 1.965, "l2_cache_size": 132644864}
_AMPERE = _HOPPER | {
  "core_count": 108,
  "fpus_per_core": 64,
  "clock_rate_ghz": 1.41,
  "l2_cache_size": 41943040,
  "shared_memory_per_core": 167936,
  "shared_memory_per_block_optin": 166912,
}
_ADA = _HOPPER | {
  "core_count": 58,
  "clock_rate_ghz": 2.04,
  "l2_cache_size": 50331648,
  "threads_per_core_limit": 1536,
  "shared_memory_per_core": 102400,
  "shared_memory_per_block_optin": 101376,
}

# Memory in bytes and `device`: xla/backends/gpu/target_config/specs of OpenXLA (a100_sxm_80,
# h100_sxm, h200, b200). Rates of memory and NVLink (half in each direction): NVIDIA's data sheets
# of the A100 80GB SXM, H100 SXM, H200 SXM and DGX B200. Network: a DGX has eight adapters, 200 Gb/s
# for A100, else 400 Gb/s (DGX user guides). L4, without an OpenXLA specification: NVIDIA's L4 data
# sheet (300 GB/s; 16 lanes of PCIe 4.0, 64 GB/s in both directions, no NVLink; 24 GB, of which
# nvidia-smi reports 23,034 MiB), CUDA's Ada tuning guide, and Google Cloud's g2-standard-96: eight
# L4 with 100 Gb/s.
GPUS = {
  "a100": Gpu("NVIDIA A100", 85_100_068_864, 2.039e12, 3e11, 2.5e10, (8, 0), _AMPERE),
  "h100": Gpu("NVIDIA H100", 84_942_979_072, 3.35e12, 4.5e11, 5e10, (9, 0), _HOPPER),
  "h200": Gpu("NVIDIA H200", 151_397_597_184, 4.8e12, 4.5e11, 5e10, (9, 0), _HOPPER),
  "b200": Gpu("NVIDIA B200", 191_514_411_008, 8e12, 9e11, 5e10, (10, 0), _BLACKWELL),
  "l4": Gpu("NVIDIA L4", 23_034 * 2**20, 3e11, 3.2e10, 1.25e10 / 8, (8, 9), _ADA),
}


def describe(gpu: Gpu) -> str:
  """Returns the description of a GPU for XLA's compiler (GpuTargetConfigProto, as text).

  It has only fields that JAX 0.10 supports.
  """
  fields = _BLOCK | gpu.device
  fields |= {"device_memory_size": int(gpu.memory), "memory_bandwidth": int(gpu.memory_rate)}
  lines = "\n".join(f"  {name}: {value}" for name, value in fields.items())
  major, minor = gpu.capability
  return f"""gpu_device_info {{
{lines}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.kind}"
"""
