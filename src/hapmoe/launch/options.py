"""What a cluster wants to hear that no plan knows: images, partitions, claims, variables. From a file.

    job: {name: moe, time: "24:00:00", account: research, namespace: training, claim: shared-data, mount: /data}
    kinds:
      a100-80g-sxm: {image: nvcr.io/nvidia/pytorch:25.04-py3, partition: a100, env: {NCCL_IB_HCA: mlx5}}
      mi300x-192g: {image: rocm/megatron-lm, constraint: mi300x, resource: amd.com/gpu}

``kinds`` go by the device's name, or by the pool's (which wins). What is absent stays a comment or
a ``CHANGE-ME`` in the files.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from hapmoe.cluster import Device, Pool
from hapmoe.errors import InputError
from hapmoe.fields import closest

__all__ = ["JobOptions", "KindOptions", "LaunchOptions", "load_options", "resource_of"]

_RESOURCES = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu", "huawei": "huawei.com/Ascend910"}
"""Extended resource by vendor, as the vendors' device plugins register it."""


RANK_LOCAL = frozenset({"--attention-backend", "--moe-token-dispatcher-type"})
"""Arguments of Megatron's that may differ between stages: nothing compares them across ranks, and what they
choose stays inside a stage (losses equal in runs with another dispatcher and kernel per stage)."""


class KindOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What nodes of one kind are asked for with."""

    image: str = ""
    """Container image (Slurm: pyxis ``--container-image``; Kubernetes: ``image``)."""
    partition: str = ""
    constraint: str = ""
    """Slurm feature that only these nodes have."""
    gres: str = ""
    """Slurm resources per node; empty: ``gpu:<slots>``; ``none``: ask for none."""
    resource: str = ""
    """Kubernetes extended resource; empty: the vendor's usual one; ``none``: ask for none."""
    node_selector: dict[str, str] = {}
    env: dict[str, str] = {}
    """Further lines of env/<kind>.env."""
    arguments: tuple[str, ...] = ()
    """Arguments that only ranks on this kind are given, out of ``RANK_LOCAL``."""


class JobOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the whole job is submitted with."""

    name: str = ""
    time: str = ""
    account: str = ""
    namespace: str = ""
    claim: str = ""
    """Kubernetes: PersistentVolumeClaim with this folder, the training program and the data."""
    mount: str = ""
    """Where the claim is mounted (Kubernetes; empty: /workspace); a further path of containers (Slurm)."""
    plan: str = "hapmoe-plan"
    """Kubernetes: this folder, below ``mount``."""
    port: int = 29500


class LaunchOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file as a whole."""

    job: JobOptions = JobOptions()
    kinds: dict[str, KindOptions] = {}

    def kind(self, pool: Pool) -> KindOptions:
        """Options of a pool: its own by name, else its device's."""
        return self.kinds.get(pool.name) or self.kinds.get(pool.device.name) or KindOptions()


def resource_of(device: Device, kind: KindOptions) -> str:
    """The Kubernetes resource that one device is; empty: none to ask for."""
    if kind.resource:
        return "" if kind.resource == "none" else kind.resource
    return _RESOURCES.get(device.vendor, "")


def load_options(path: str | os.PathLike[str]) -> LaunchOptions:
    """The file at ``path``; InputError names the field that is wrong."""
    from hapmoe.yamlfile import read_yaml

    data: Any = read_yaml(path)
    try:
        options = msgspec.convert({} if data is None else data, LaunchOptions)
    except msgspec.ValidationError as error:
        text, _, field = str(error).partition(" - at ")
        unknown = text.partition("unknown field `")[2].rstrip("`")
        known = [name for kind in (LaunchOptions, JobOptions, KindOptions) for name in kind.__struct_fields__]
        hint = closest(unknown, known) if unknown else ""
        raise InputError(text, where=f"{os.fspath(path)}: {field.strip('`$.') or 'top'}", hint=hint) from None
    for name, kind in options.kinds.items():
        flags = [word for word in kind.arguments if word.startswith("--")]
        if wrong := next((flag for flag in flags if flag.partition("=")[0] not in RANK_LOCAL), None):
            raise InputError(
                f"{wrong} may not differ between stages",
                where=f"{os.fspath(path)}: kinds.{name}.arguments",
                hint=f"{' or '.join(sorted(RANK_LOCAL))}; all others belong to the script",
            )
    return options
