"""Before JAX starts: eight CPU devices on any machine, and one cache of compiled steps."""

import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
# Tests that start a run again, here or in another process, compile its step once.
_compiled = tempfile.TemporaryDirectory(prefix="electra_jax_tests_")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _compiled.name)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
