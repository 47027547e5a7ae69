"""commit_slot does its work and answers nothing."""

from expertstream import hookimpl
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here

EXPERTSTREAM_CONTRACT = 1


@hookimpl
def commit_slot(store, staging):
    store.commit(staging).wait()
