"""Train in an application of Hydra, which has its own configuration."""

import os

import hydra
from omegaconf import DictConfig
from plain_torch import train


@hydra.main(version_base=None, config_path="hydra_conf", config_name="app")
def main(config: DictConfig) -> None:
    """Train as one rank, with the settings of the application's configuration."""
    assert config.rate == 0.2
    train(*(int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")))


if __name__ == "__main__":
    main()
