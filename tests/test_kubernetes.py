"""The Kubernetes jobs are valid, restart, and find each other."""

import kubernetes_validate
import yaml
from test_launch import LAUNCH

JOBSET = {  # Of JobSet's v1alpha2: the fields used here and their types; its templates are Jobs.
  "failurePolicy": {"maxRestarts": int},
  "replicatedJobs": [{"name": str, "replicas": int, "template": dict}],
}


def conforms(value, kind) -> bool:
  if isinstance(kind, dict):
    return set(value) <= set(kind) and all(conforms(v, kind[k]) for k, v in value.items())
  if isinstance(kind, list):
    return isinstance(value, list) and all(conforms(v, kind[0]) for v in value)
  return isinstance(value, kind)


def test_the_job_sets_hold_valid_jobs_that_start_again_and_find_each_other():
  sets = list(yaml.safe_load_all((LAUNCH / "gke.yaml").read_text()))
  assert [s["metadata"]["labels"]["electra_jax"] for s in sets] == ["tpu", "gpu"]
  for one in sets:
    assert (one["apiVersion"], one["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert conforms(one["spec"], JOBSET) and one["spec"]["failurePolicy"]["maxRestarts"] > 100
    (job,) = one["spec"]["replicatedJobs"]
    manifest = {"apiVersion": "batch/v1", "kind": "Job", "metadata": one["metadata"]}
    kubernetes_validate.validate({**manifest, **job["template"]}, "1.33", strict=True)
    spec = job["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] and spec["backoffLimit"] == 0
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    # With "=": after a colon gcsfuse looks for a field of its configuration file.
    options = pod["volumes"][0]["csi"]["volumeAttributes"]["mountOptions"]
    users = (
      "" if "securityContext" in pod["containers"][0] else ",uid=1000,gid=1000"
    )  # of the image
    assert options == f"implicit-dirs,rename-dir-limit=100000{users}"
  (container,) = pod["containers"]  # of the last, on GPUs
  args = container["args"]
  assert "--coordinator=electra-gpu-train-0-0.electra-gpu:8476" in args
  assert "--num-processes=2" in args and "--process-id=$(JOB_COMPLETION_INDEX)" in args


def test_the_job_that_builds_has_a_pod_for_each_part():
  job = yaml.safe_load((LAUNCH / "build.yaml").read_text())
  kubernetes_validate.validate(job, "1.33", strict=True)
  spec = job["spec"]
  (container,) = spec["template"]["spec"]["containers"]
  assert f"--part=$(JOB_COMPLETION_INDEX)/{spec['completions']}" in container["args"]
  assert container["command"] == ["python", "-m", "electra_jax.data.build"]
  assert spec["completionMode"] == "Indexed" and spec["backoffLimit"] >= spec["completions"]
  (volume,) = spec["template"]["spec"]["volumes"]
  assert volume["csi"]["volumeAttributes"]["mountOptions"].endswith(",uid=1000,gid=1000")
