"""Grid points as arrays: which pool each stage stands on, and what its transfers take.

Array legend: G grid points, P pools, J stages (padded), K options.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hapmoe.boundary import boundary_s
from hapmoe.cluster import Cluster
from hapmoe.job import JobSpec
from hapmoe.options import FloatArray, IntArray, Options

__all__ = ["Points", "Sends", "join", "price_sends", "sends_of", "stage_pools"]


@dataclass(frozen=True, slots=True)
class Points:
    """G grid points."""

    option_G: IntArray
    stages_GP: IntArray
    """Stages per pool, pools as the cluster lists them."""
    order_G: IntArray
    """Number of the order of pools (``Space.orders``)."""
    vpp_G: IntArray

    @property
    def pp_G(self) -> IntArray:
        total: IntArray = self.stages_GP.sum(axis=1)
        return total

    def __len__(self) -> int:
        return len(self.option_G)

    def take(self, which: IntArray | NDArray[np.bool_]) -> Points:
        return Points(self.option_G[which], self.stages_GP[which], self.order_G[which], self.vpp_G[which])


@dataclass(frozen=True, slots=True)
class Sends:
    """Seconds of one transfer, per option."""

    near_PK: FloatArray
    """Between stages of one pool on one scale-up fabric."""
    far_PK: FloatArray
    cross_PPK: FloatArray
    """From one pool to another; infinite where no link joins them."""
    domain_P: IntArray
    """Devices that share a scale-up fabric."""
    size_PK: IntArray
    """Devices of a stage on each pool."""

    def take(self, which: IntArray) -> Sends:
        """Only these options."""
        cross = self.cross_PPK[:, :, which]
        return Sends(self.near_PK[:, which], self.far_PK[:, which], cross, self.domain_P, self.size_PK[:, which])


def price_sends(job: JobSpec, cluster: Cluster, options: Options) -> Sends:
    """Every kind of boundary that a pipeline can have, priced for every option."""
    pools = cluster.pools
    near, far = (
        np.stack([boundary_s(job, cluster, pool, pool, options, inside) for pool in pools]) for inside in (True, False)
    )
    cross = np.stack(
        [
            np.stack(
                [
                    far[p] if p == q else boundary_s(job, cluster, pool, other, options, False)
                    for q, other in enumerate(pools)
                ]
            )
            for p, pool in enumerate(pools)
        ]
    )
    domains = [max(pool.device.scale_up_domain // pool.devices_per_node, 1) * pool.devices_per_node for pool in pools]
    return Sends(near, far, cross, np.asarray(domains, np.int64), np.tile(options.devices_K, (len(pools), 1)))


def stage_pools(points: Points, orders: tuple[tuple[int, ...], ...]) -> tuple[IntArray, IntArray]:
    """[G, J] pool of every stage and its place within the pool; all points have the same pp."""
    pp = int(points.pp_G[0]) if len(points) else 0
    width = max(len(order) for order in orders)
    table = np.asarray([[*order, *[order[-1]] * (width - len(order))] for order in orders], np.int64)
    used = np.asarray([[1] * len(order) + [0] * (width - len(order)) for order in orders], np.int64)
    order_GW = table[points.order_G]
    counts_GW = np.take_along_axis(points.stages_GP, order_GW, axis=1) * used[points.order_G]
    ends_GW = np.cumsum(counts_GW, axis=1)
    slot_GJ = (np.arange(pp)[None, :, None] >= ends_GW[:, None, :]).sum(axis=2)
    pool_GJ = np.take_along_axis(order_GW, slot_GJ, axis=1)
    begin_GJ = np.take_along_axis(ends_GW - counts_GW, slot_GJ, axis=1)
    return pool_GJ, np.arange(pp)[None, :] - begin_GJ


def sends_of(points: Points, pool_GJ: IntArray, place_GJ: IntArray, sends: Sends) -> FloatArray:
    """[G, J] seconds from every stage to the next; the last entry wraps to the first stage."""
    k = points.option_G[:, None]
    size = sends.size_PK[pool_GJ, k]
    following_pool, following_place = np.roll(pool_GJ, -1, axis=1), np.roll(place_GJ, -1, axis=1)
    first = np.minimum(place_GJ, following_place) * size
    last = (np.maximum(place_GJ, following_place) + 1) * size - 1
    domain = sends.domain_P[pool_GJ]
    inside = first // domain == last // domain
    within = np.where(inside, sends.near_PK[pool_GJ, k], sends.far_PK[pool_GJ, k])
    return np.where(pool_GJ == following_pool, within, sends.cross_PPK[pool_GJ, following_pool, k])


def join(parts: list[Points]) -> Points:
    """One after the other."""
    return Points(
        np.concatenate([part.option_G for part in parts]),
        np.concatenate([part.stages_GP for part in parts]),
        np.concatenate([part.order_G for part in parts]),
        np.concatenate([part.vpp_G for part in parts]),
    )
