import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tensors as small as these only wait for a second one."""
    torch.set_num_threads(1)
