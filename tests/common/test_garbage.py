import gc

import pytest

from optkit.common.garbage import uncollected


def test_collections_are_left_out_and_come_back_as_they_were() -> None:
    with pytest.raises(KeyError), uncollected():
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
