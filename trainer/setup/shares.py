"""How the setting `shares` splits a batch over the ranks that are there."""

from __future__ import annotations

from trainer.ranks.agreement import gather_lines
from trainer.ranks.rank_info import RankInfo
from trainer.shared.errors import TrainError
from trainer.shared.settings import Settings
from trainer.shared.shares import Speed, at_most, parse_speeds, split_batch


def shares_of_ranks(settings: Settings, info: RankInfo) -> tuple[tuple[int, ...], list[Speed | None]]:
    """Samples of a full batch for each rank, and what is known of its speed.

    Raises TrainError where the setting does not fit the ranks there are.
    """
    names = [line.rpartition(":") for line in gather_lines(f"{info.node}:{info.local_rank}")]
    ranks = [(node, int(local_rank)) for node, _, local_rank in names]
    speeds = {rank: at_most(speed, settings.local_batch) for rank, speed in parse_speeds(settings.speeds).items()}
    try:
        shares = split_batch(settings.shares, speeds, ranks, settings.batch)
    except ValueError as error:
        raise TrainError(f"shares: {error}") from error
    return shares, [speeds.get(rank) for rank in ranks]
