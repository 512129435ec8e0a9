"""Tests only: with this folder on PYTHONPATH, child processes (SGLang's own among them) import as the tests do."""

import torchvision_schemas

torchvision_schemas.install()
