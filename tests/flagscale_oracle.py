"""What FlagScale v0.9.0 makes of process meshes, rewritten from its rules for tests; its defects included.

Arguments: flagscale/train/arguments.py:85-225. Groups: flagscale/train/hetero/parallel_context.py,
``build_inter_mesh_process_groups`` and ``build_global_process_groups``; ``DENSE_AXIS`` and ``EXPERT_AXIS``
are the axes that ``logical_coords_to_physical_ranks`` (:528-537) leaves out, 3 and 2 as released.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import pairwise, product

__all__ = ["RELEASED", "REPAIRED", "MeshShape", "check_arguments", "layer_offsets", "right_pairs", "wire"]

RELEASED, REPAIRED = (3, 2), (2, 1)


@dataclass(frozen=True)
class MeshShape:
    tp: int
    ep: int
    etp: int
    dp: int
    pp: int

    @property
    def edp(self) -> int:
        return self.tp * self.dp // (self.ep * self.etp)

    @property
    def world(self) -> int:
        return self.tp * self.dp * self.pp


def check_arguments(argv: list[str], micro_batches: int | None = None) -> argparse.Namespace:
    """The assertions of ``pre_validate_args``, on emitted words."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size"):
        parser.add_argument(f"--{name}", type=int, default=1)
    for name in ("micro-batch-size", "global-batch-size", "num-layers", "mtp-num-layers"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--hetero-process-meshes", type=int, nargs="*")
    parser.add_argument("--hetero-device-types", nargs="*")
    parser.add_argument("--hetero-current-device-type")
    parser.add_argument("--hetero-pipeline-layer-split", type=int, nargs="*")
    parser.add_argument("--expert-tensor-parallel-size-per-process-mesh", type=int, nargs="*")
    parser.add_argument("--recompute-granularity")
    parser.add_argument("--distributed-backend", choices=["nccl", "gloo", "flagcx"])
    for name in (
        "enable-hetero",
        "sequence-parallel",
        "hetero-use-cpu-communication",
        "use-partial-reduce-for-shared-embedding",
        "untie-embeddings-and-output-weights",
        "use-distributed-optimizer",
    ):
        parser.add_argument(f"--{name}", action="store_true")
    args = parser.parse_known_args(argv)[0]
    meshes = args.hetero_process_meshes
    assert args.enable_hetero and meshes and len(meshes) % 5 == 0
    tp, cp, _, dp, pp = (meshes[axis::5] for axis in range(5))
    if args.expert_tensor_parallel_size_per_process_mesh is not None:
        assert len(args.expert_tensor_parallel_size_per_process_mesh) == len(tp)
    assert all(dp[0] * args.micro_batch_size % other == 0 for other in dp)
    assert set(cp) == {1} and args.context_parallel_size == 1
    assert args.pipeline_model_parallel_size == sum(pp)
    if not args.untie_embeddings_and_output_weights or args.mtp_num_layers:
        assert tp[0] == tp[-1]
        if dp[0] != dp[-1] and args.use_distributed_optimizer:
            assert dp[0] % dp[-1] == 0 or dp[-1] % dp[0] == 0
            assert args.use_partial_reduce_for_shared_embedding
    assert len(set(tp)) == 1 or args.sequence_parallel
    assert len(args.hetero_pipeline_layer_split) == args.pipeline_model_parallel_size
    assert sum(args.hetero_pipeline_layer_split) == args.num_layers
    assert len(args.hetero_device_types) == len(tp)
    assert args.hetero_current_device_type in args.hetero_device_types
    return args


def layer_offsets(args: argparse.Namespace, *, repaired: bool = False) -> list[int]:
    """``get_transformer_layer_offset`` per stage: counted only where the mesh itself is a pipeline."""
    found, stage = [], 0
    for pp in args.hetero_process_meshes[4::5]:
        for _ in range(pp):
            counted = pp > 1 or repaired
            found.append(sum(args.hetero_pipeline_layer_split[:stage]) if counted else 0)
            stage += 1
    return found


def _overlaps(first: int, second: int) -> dict[int, list[int]]:
    """Which of ``second`` equal parts of a whole overlap each of ``first``."""
    return {
        i: [j for j in range(second) if i * second < (j + 1) * first and (i + 1) * second > j * first]
        for i in range(first)
    }


def _rank(mesh: MeshShape, offset: int, coordinates: tuple[int, int, int, int], *, expert: bool, axis: int) -> int:
    sizes = (mesh.etp, 1, mesh.ep, mesh.edp, mesh.pp) if expert else (mesh.tp, 1, 1, mesh.dp, mesh.pp)
    kept = [size for index, size in enumerate(sizes) if index != axis]
    rank, stride = offset, 1
    for coordinate, size in zip(coordinates, kept, strict=True):
        rank += coordinate * stride
        stride *= size
    return rank


def _lists(mesh: MeshShape, offset: int, token: str) -> list[list[int]]:
    """Rank lists of one mesh, by its own generators (which are right)."""
    stage = mesh.tp * mesh.dp
    if token == "pp":
        return [[offset + rank + stage * p for p in range(mesh.pp)] for rank in range(stage)]
    inner = mesh.tp if token == "tp-pp" else mesh.etp * mesh.ep
    return [
        [offset + start + rank + stage * p for p in range(mesh.pp) for rank in range(inner)]
        for start in range(0, stage, inner)
    ]


def wire(meshes: list[MeshShape], axes: tuple[int, int]) -> tuple[set[tuple[int, int]], dict[str, set[int]]]:
    """(pairs of ranks that send to each other, ranks that are in some group, per kind of group)."""
    dense, expert = axes
    offsets = [sum(mesh.world for mesh in meshes[:index]) for index in range(len(meshes))]
    pairs: dict[str, set[tuple[int, int]]] = {"pp": set(), "tp-pp": set(), "tp-ep-pp": set()}
    for i, (one, two) in enumerate(pairwise(meshes)):
        a, b = offsets[i], offsets[i + 1]
        end, dp_map, edp_map = one.pp - 1, _overlaps(one.dp, two.dp), _overlaps(one.edp, two.edp)
        sp_map = _overlaps(one.tp, two.tp) if (one.tp, two.tp) != (1, 1) else {0: [0]}
        for s, k in product(range(one.tp), range(one.dp)):
            source = _rank(one, a, (s, 0, k, end), expert=False, axis=dense)
            for to, d in product(sp_map[s], dp_map[k]):
                pairs["pp"].add((source, _rank(two, b, (to, 0, d, 0), expert=False, axis=dense)))
        for k in range(one.dp):
            source = _rank(one, a, (one.tp - 1, 0, k, end), expert=False, axis=dense)
            pairs["tp-pp"] |= {(source, _rank(two, b, (0, 0, d, 0), expert=False, axis=dense)) for d in dp_map[k]}
        for k in range(one.edp):
            source = _rank(one, a, (one.etp - 1, one.ep - 1, k, end), expert=True, axis=expert)
            pairs["tp-ep-pp"] |= {(source, _rank(two, b, (0, 0, d, 0), expert=True, axis=expert)) for d in edp_map[k]}
    covered: dict[str, set[int]] = {}
    for token, joined in pairs.items():
        paths: list[list[int]] = [[]]
        for index, mesh in enumerate(meshes):
            lists = _lists(mesh, offsets[index], token)
            paths = [
                path + ranks
                for path in paths
                for ranks in lists
                if index == 0 or any((before, ranks[0]) in joined for before in path)
            ]
        covered[token] = {rank for path in paths for rank in path}
    return pairs["pp"], covered


def right_pairs(meshes: list[MeshShape]) -> set[tuple[int, int]]:
    """Who should send to whom, from what each rank holds: shares of the sequence and of the batch.

    Independent of the above: ranks are taken apart, shares are fractions of one.
    """
    found, offset = set(), 0
    for one, two in pairwise(meshes):
        last, first = offset + one.world - one.tp * one.dp, offset + one.world
        for i, j in product(range(one.tp * one.dp), range(two.tp * two.dp)):
            shares = ((i % one.tp, one.tp, j % two.tp, two.tp), (i // one.tp, one.dp, j // two.tp, two.dp))
            if all(max(x / n, y / m) < min((x + 1) / n, (y + 1) / m) - 1e-9 for x, n, y, m in shares):
                found.add((last + i, first + j))
        offset += one.world
    return found
