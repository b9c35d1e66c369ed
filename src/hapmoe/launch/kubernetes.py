"""Target ``kubernetes``: one JobSet, one replicated job per kind of device, and no operator for training.

JobSet v1alpha2 (kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go) gives the pods of an
Indexed job stable names, ``<jobset>-<job>-0-<index>.<subdomain>``; jobs stand in rank order, so
NODE_RANK is NODE_OFFSET of the job plus JOB_COMPLETION_INDEX.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from hapmoe.cluster import Cluster
from hapmoe.job import JobSpec
from hapmoe.launch.options import LaunchOptions, resource_of
from hapmoe.launch.parts import Component, Parts, parts, render
from hapmoe.plan import Plan

__all__ = ["files"]

_LABEL = 63
"""Longest DNS label; a pod's name is <jobset>-<job>-0-<index>."""


def files(
    job: JobSpec, cluster: Cluster, plan: Plan, plan_json: str, options: LaunchOptions | None = None
) -> dict[str, str]:
    """Relative path -> text: the parts of every launch, ``jobset.yaml`` and the ``launch.sh`` that applies it."""
    options = options or LaunchOptions()
    name = _name(options.job.name or job.name, cluster)
    made = parts(
        job,
        cluster,
        plan,
        plan_json,
        start="start_kubernetes.j2",
        options=options,
        names=f"{name}-{{component}}-0-{{index}}.{name}",
        given_hosts=False,
    )
    values = {**made.values, "jobset": name, "namespace": options.job.namespace}
    return {
        **made.files,
        "jobset.yaml": _manifest(made, options, name),
        "launch.sh": render("launch_kubernetes.sh.j2", values),
    }


def _name(wanted: str, cluster: Cluster) -> str:
    """A DNS label, short enough for the longest pod name, the controller's suffix of 6 included
    (pkg/webhooks/jobset_webhook.go:225-262)."""
    label = re.sub(r"[^a-z0-9]+", "-", wanted.lower()).strip("-")
    label = label if label[:1].isalpha() else f"job-{label}".strip("-")
    longest = min(max((len(pool.name) for pool in cluster.pools), default=0), 24) + len("--00-0-0000-suffix")
    return label[: max(_LABEL - longest, 8)].rstrip("-")


def _manifest(made: Parts, options: LaunchOptions, name: str) -> str:
    metadata = {"name": name}
    if options.job.namespace:
        metadata["namespace"] = options.job.namespace
    document = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [_replicated(component, made, options, name) for component in made.components],
        },
    }
    lines = [f"# {made.values['name']}: {made.values['world']} devices. One replicated job per kind, in rank order:"]
    for component in made.components:
        last = component.first + component.nodes - 1
        shown = f"node {last}" if component.nodes == 1 else f"nodes {component.first}-{last}"
        lines.append(f"#   {component.name}: {shown}, {component.slots} x {component.pool.device.name}")
    if made.blocked:
        lines.append(f"# NOT LAUNCHABLE: {made.blocked}")
    return "\n".join(lines) + "\n" + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)


def _replicated(component: Component, made: Parts, options: LaunchOptions, name: str) -> dict[str, Any]:
    kind = options.kind(component.pool)
    resource = resource_of(component.pool.device, kind)
    first = made.components[0]
    mount = options.job.mount.rstrip("/") or "/workspace"
    environment: list[dict[str, Any]] = [
        {"name": "NODE_OFFSET", "value": str(component.first)},
        {"name": "MASTER_ADDR", "value": f"{name}-{first.name}-0-0.{name}"},
        {"name": "MASTER_PORT", "value": str(options.job.port)},
        {"name": "HAPMOE_WORKDIR", "value": mount},
    ]
    container: dict[str, Any] = {
        "name": "train",
        "image": kind.image or f"CHANGE-ME/image-for-{component.pool.device.name}",
        "command": [
            "bash",
            "-c",
            f'NODE_RANK=$((NODE_OFFSET + JOB_COMPLETION_INDEX)) exec "{mount}/{options.job.plan}/run_node.sh"',
        ],
        "env": environment,
    }
    if made.values["variables"]:
        container["envFrom"] = [{"secretRef": {"name": f"{name}-values"}}]
    container["ports"] = [{"containerPort": options.job.port}]
    if resource:
        container["resources"] = {"limits": {resource: component.slots}}
    container["volumeMounts"] = [
        {"name": "shared", "mountPath": mount},
        # Data loaders and collective libraries share memory; a pod gets 64 MiB by default.
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    pod: dict[str, Any] = {"restartPolicy": "Never"}
    if kind.node_selector:
        pod["nodeSelector"] = dict(kind.node_selector)
    pod["containers"] = [container]
    pod["volumes"] = [
        {"name": "shared", "persistentVolumeClaim": {"claimName": options.job.claim or "CHANGE-ME-claim"}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    spec = {
        "completions": component.nodes,
        "parallelism": component.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    return {"name": component.name, "replicas": 1, "template": {"spec": spec}}
