"""The data room: real data sets, each in one canonical form that is checked every time it is read.

>>> from apical import data
>>> x_train, y_train, x_test, y_test = data.load("digits")
>>> x_train.shape, y_test.shape
(torch.Size([1437, 1, 8, 8]), torch.Size([360]))

``load`` reads a set, ``fetch`` downloads its official files, ``verify`` says what a file was compared with,
``listing`` says what is where, and ``from_tensors`` checks your own four tensors. A new data set is one
entry of ``DATASETS``; a new kind of data is one file with a subclass of ``Source``.
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
