"""Data sets, each stored in one canonical file that is checked every time it is read.

>>> from apical import data
>>> x_train, y_train, x_test, y_test = data.load("digits")
>>> x_train.shape, y_test.shape
(torch.Size([1437, 1, 8, 8]), torch.Size([360]))

``load`` reads a data set, ``fetch`` downloads its official files, ``verify`` checks a stored file, ``listing``
lists all data sets and whether they are on this machine, and ``from_tensors`` checks four tensors of your own.
To add a data set, add an entry to ``DATASETS``; to add a kind of data, write a subclass of ``Source``.
"""

from apical.data.characters import Characters
from apical.data.dataset import Dataset, from_tensors
from apical.data.images import Images
from apical.data.official import fetch
from apical.data.registry import DATASETS, Listing, listing, load, lookup, verify
from apical.data.sentences import Sentences
from apical.data.series import Series
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
