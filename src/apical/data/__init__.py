"""Data sets, each stored in one canonical file that is checked every time it is read.

>>> from apical import data
>>> x_train, y_train, x_test, y_test = data.load("digits")
>>> x_train.shape, y_test.shape
(torch.Size([1437, 1, 8, 8]), torch.Size([360]))

``load`` reads a data set, ``fetch`` downloads its official files, ``verify`` checks a stored file, ``listing``
lists all data sets and whether they are on this machine, and ``from_tensors`` checks four tensors of your own.
To add a data set, add a table to ``datasets.toml``; to add a kind of data, write a subclass of ``Source``.
"""

from apical.data.dataset import Dataset, from_tensors
from apical.data.images import Images
from apical.data.registry import DATASETS, Listing, fetch, listing, load, lookup, verify
from apical.data.sentences import Sentences
from apical.data.sequences import Characters, Series
from apical.data.source import Array, Remote, Report, Source, data_folder

__all__ = [
    "DATASETS",
    "Array",
    "Characters",
    "Dataset",
    "Images",
    "Listing",
    "Remote",
    "Report",
    "Sentences",
    "Series",
    "Source",
    "data_folder",
    "fetch",
    "from_tensors",
    "listing",
    "load",
    "lookup",
    "verify",
]
