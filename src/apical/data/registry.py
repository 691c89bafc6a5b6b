"""The registry of data sets by name, and the functions that take such a name.

To add a data set, add an entry to ``DATASETS``. An md5 is the one published with the official file. A SHA-256 is
computed from a canonical array, so the same data is recognised in whichever file it is stored.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apical.data import images, series
from apical.data.characters import Characters, OwnText
from apical.data.dataset import Dataset
from apical.data.digits import Digits
from apical.data.images import Images
from apical.data.sentences import Sentences
from apical.data.series import OwnSeries, Series
from apical.data.source import PathLike, Remote, Report, Source
from apical.errors import DataError

_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_SVHN = "http://ufldl.stanford.edu/housenumbers/"
_CIFAR = "https://www.cs.toronto.edu/~kriz/"
_HALF = (0.5, 0.5, 0.5)
_RAW = "https://raw.githubusercontent.com/"
_KARPATHY = _RAW + "karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/"
_LAI = _RAW + "laiguokun/multivariate-time-series-data/7f402f185cc2435b5e66aed13a3b560ed142e023/"
_ZHOU = _RAW + "zhouhaoyi/ETDataset/1d16c8f4f943005d613b5bc962e9eeb06058cf07/ETT-small/"
_DCRNN = "https://github.com/liyaguang/DCRNN"

_ENTRIES: tuple[Source, ...] = (
    Digits(
        name="digits",
        title="handwritten digits, from scikit-learn",
        shape=(8, 8),
        train=1437,
        test=360,
        classes=10,
        levels=16,
        mean=(0.5,),
        std=(0.5,),
        sums={
            "x_train": "a30b7894b158f35ee23bbcb9ef30e807d2304aedebf2692c02e5c50ad18bbf5e",
            "y_train": "01a4186457603b37dcf091e18525a11851fd7c87c6dbc0b7b137f07f537324bb",
            "x_test": "e497a9a8b9c8b6a1ec1595a2399033da24cb9b7ad07934de2a5b3230436f5d89",
            "y_test": "f4a09a21874da5400cfa7e7ee872a9574fa6ff75e23831479d52d3c356ce60f0",
        },
    ),
    Images(
        name="mnist",
        title="MNIST handwritten digits",
        shape=(28, 28),
        train=60_000,
        test=10_000,
        classes=10,
        mean=(0.1307,),
        std=(0.3081,),
        parser=images.parse_idx,
        files=(
            Remote(_MNIST + "train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            Remote(_MNIST + "train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
            Remote(_MNIST + "t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
            Remote(_MNIST + "t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
        ),
        sums={
            "x_train": "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
            "y_train": "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
            "x_test": "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
            "y_test": "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
        },
    ),
    Images(
        name="fashion_mnist",
        title="Fashion-MNIST clothing",
        shape=(28, 28),
        train=60_000,
        test=10_000,
        classes=10,
        mean=(0.2860,),
        std=(0.3205,),
        parser=images.parse_idx,
        files=(
            Remote(_FASHION + "train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            Remote(_FASHION + "train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
            Remote(_FASHION + "t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
            Remote(_FASHION + "t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
        ),
        sums={
            "x_train": "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
            "y_train": "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
            "x_test": "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
            "y_test": "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
        },
        note="MIT licence",
    ),
    Images(
        name="svhn",
        title="Street View house numbers, cropped digits",
        shape=(32, 32, 3),
        train=73_257,
        test=26_032,
        classes=10,
        mean=_HALF,
        std=_HALF,
        parser=images.parse_svhn,
        files=(
            Remote(_SVHN + "train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
            Remote(_SVHN + "test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
        ),
        # These sums are of crops rebuilt from the original full-number photographs. A few dozen of 300 million
        # values may be rounded differently in the official crops, so a file made from those is checked against
        # the sums recorded in it.
        official_sums=False,
        sums={
            "x_train": "2ad6a4d495b01bbee807888f2c432ea3d33b94330a2d0feb0120ca20c8993b82",
            "y_train": "6a6e359bb9ecc6ce40896703f7b224715776155fe39710e0ddb8008a18172c6f",
            "x_test": "a2abccfbdf457b8d7a2d6f2fc54ce3d1df8a5979f409ffe120e189c216a1d32a",
            "y_test": "c2488ef300c629f4bd90a3d2a7b4141589e5b5a4f9046845dfc1a9021319e31a",
        },
        note="non-commercial use only",
    ),
    Images(
        name="cifar10",
        title="CIFAR-10 small photographs",
        shape=(32, 32, 3),
        train=50_000,
        test=10_000,
        classes=10,
        mean=_HALF,
        std=_HALF,
        parser=images.parse_cifar10,
        files=(Remote(_CIFAR + "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
        sums={
            "x_train": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
            "y_train": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
            "x_test": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
            "y_test": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
        },
    ),
    Images(
        name="cifar100",
        title="CIFAR-100 small photographs, fine labels",
        shape=(32, 32, 3),
        train=50_000,
        test=10_000,
        classes=100,
        mean=_HALF,
        std=_HALF,
        parser=images.parse_cifar100,
        files=(Remote(_CIFAR + "cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),),
        # These sums are of the official images sorted by class. The official file has another order, so a file made
        # from it is checked against the sums recorded in it.
        official_sums=False,
        sums={
            "x_train": "a678f5ab6ac125c4dfba98c64d1562b510eff50354e165b75e65d808f7be34c5",
            "y_train": "24e451cae1d0bb4af05bb556f43f7442043340bdc64d9e1896c2ad19efa810d1",
            "x_test": "8532fd42ce092c665328a7201998ab7e8768dad37afff89be94e13106523a495",
            "y_test": "7335f3ca04ad4876c5479947470a13b869b8fe2143b1077bb51b95a0c23892b1",
        },
    ),
    Images(
        name="tiny_imagenet",
        title="Tiny-ImageNet photographs (test: the official validation images)",
        shape=(64, 64, 3),
        train=100_000,
        test=10_000,
        classes=200,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        parser=images.parse_tiny_imagenet,
        files=(Remote("http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"),),
        # These sums are of images decoded by Pillow and of classes sorted by name. Other JPEG decoders differ in the last
        # bit, and the official archive has another order of classes, so a file made from it is checked against the
        # sums recorded in it.
        official_sums=False,
        sums={
            "x_train": "f5964469a6408de49502ada918c7223fe45e2e123f1c343e0ffd0c091b55e499",
            "y_train": "ea210d0631a1703a399d3ce6b0385a74205edbc55b873e2ad7d7fff6dd1bd8e3",
            "x_test": "c2fd10cde1427ad6f16f45c978a0060bfd8f664727f6ad977ea5590280d57b8f",
            "y_test": "a6d0aa8d4df540f2af8c5506c471ed46dafa4e874e00f46cc8000022336ccfd4",
        },
        note="ImageNet's terms: non-commercial research and education",
    ),
    Characters(
        name="tinyshakespeare",
        title="characters: plays of Shakespeare",
        length=1_115_394,
        files=(Remote(_KARPATHY + "tinyshakespeare/input.txt", "6fb458f1232090904fb40fe944165e91"),),
        sums={"text": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"},
    ),
    Characters(
        name="sherlock_holmes",
        title="characters: the Sherlock Holmes stories of Conan Doyle",
        length=3_114_666,
        unknown=True,  # the test part has one ô, which is not in the training part
        sums={"text": "ed06844c00436bb78fedb7a6bd1f4e0c47ed0ede61e87eb36654687daf6225ca"},
    ),
    Series(
        name="electricity",
        title="series: hourly electricity of 321 clients, 2012 to 2014",
        length=26_304,
        series=321,
        parser=series.parse_gzipped,
        files=(Remote(_LAI + "electricity/electricity.txt.gz"),),
        official_sums=False,
    ),
    Series(
        name="metr_la",
        title="series: traffic speeds in Los Angeles, every five minutes",
        length=34_272,
        series=207,
        parser=series.parse_pandas_frame,
        files=(Remote("metr-la.h5", page=_DCRNN),),
        official_sums=False,
    ),
    Series(
        name="metr_la_week1",
        title="series: the first week of metr_la",
        length=2016,
        series=207,
        sums={"values": "cd3fbf13fe5dfdd5cc4e1cb04cc86f0dded323f1cc553013c69715e2409b188c"},
    ),
    Series(
        name="pems_bay",
        title="series: traffic speeds in the Bay Area, every five minutes",
        length=52_116,
        series=325,
        parser=series.parse_pandas_frame,
        files=(Remote("pems-bay.h5", page=_DCRNN),),
        official_sums=False,
    ),
    Series(
        name="exchange_rate",
        title="series: daily exchange rates of eight countries, 1990 to 2016",
        length=7588,
        series=8,
        parser=series.parse_gzipped,
        files=(Remote(_LAI + "exchange_rate/exchange_rate.txt.gz"),),
        sums={"values": "aeff8c9d165f43e73b389990b4fc16fcdca1bb321ba680fb09d4cd2da7f5bc0b"},
    ),
    Series(
        name="etth1",
        title="series: hourly load and oil temperature of a transformer",
        length=17_420,
        series=7,
        parser=series.parse_ett,
        files=(Remote(_ZHOU + "ETTh1.csv"),),
        sums={"values": "8fec12c3e12d38424e0b03cdff21909ef67b92609ba3d76b64f3937ac481e93a"},
        note="CC BY-ND 4.0",
    ),
    Series(
        name="etth2",
        title="series: hourly load and oil temperature of another transformer",
        length=17_420,
        series=7,
        parser=series.parse_ett,
        files=(Remote(_ZHOU + "ETTh2.csv"),),
        sums={"values": "0c3b296810a8a7f6b8e3c6591ca606800ed0780aba7ee754c1dbba454d1ced43"},
        note="CC BY-ND 4.0",
    ),
    Sentences(
        name="mr",
        title="sentences: movie reviews, negative or positive",
        sentences=10_662,
        bytes_of={"mr_neg.txt": 607_152, "mr_pos.txt": 621_052},
        sums={
            "mr_neg.txt": "a4c001bb5a9d2e067052b714cb9e9861e2f0da13b267f9d1ea5f2b7288c7c055",
            "mr_pos.txt": "52da6e09f9e71bc077cedcf151b40f63e9441f1de61a12baa4f41e9a06edaf70",
        },
    ),
    Sentences(
        name="subj",
        title="sentences: objective plots or subjective reviews of films",
        sentences=10_000,
        bytes_of={"subj_objective.txt": 664_408, "subj_subjective.txt": 625_953},
        sums={
            "subj_objective.txt": "fdbe34773b18696d004dd8f95a9cbad6a035624ea19f06e531d3fbc008fc0a65",
            "subj_subjective.txt": "b3d3d922ddb737b9efef6e3d310abe9bd4609fe1348ebe5a52f437c125b01303",
        },
    ),
)

DATASETS: dict[str, Source] = {entry.name: entry for entry in _ENTRIES}


@dataclass(frozen=True)
class Listing:
    """One row of ``apical data list``; ``state`` is the value of :meth:`Source.state`."""

    name: str
    title: str
    size: str
    state: str
    note: str


def lookup(name: str | Source) -> Source:
    """Return the registry entry of a name.

    ``text:PATH`` and ``series:PATH`` give an entry for a file of your own. A ``Source`` is returned unchanged.
    """
    if isinstance(name, Source):
        return name
    if name in DATASETS:
        return DATASETS[name]
    kind, _, path = str(name).partition(":")
    if kind == "text" and path:
        return OwnText(name=name, title="a text of yours", path=Path(path).expanduser())
    if kind == "series" and path:
        return OwnSeries(name=name, title="series of yours", path=Path(path).expanduser())
    closest = difflib.get_close_matches(str(name).lower().replace("-", "_"), DATASETS, n=1)
    hint = f" (did you mean {closest[0]}?)" if closest else ""
    raise DataError(
        f"There is no data set called {name!r}{hint}: the names are {', '.join(DATASETS)}, and text:PATH or series:PATH "
        "for a file of yours."
    )


def load(name: str | Source, *, root: PathLike | None = None, **options: Any) -> Dataset:
    """Load a data set as normalised tensors on the CPU.

    Its types, shapes, labels and SHA-256 are checked first. ``root`` is the folder of the canonical files, by
    default ``$APICAL_DATA`` or else the user's cache folder. ``options`` depend on the kind of data, for example
    ``window`` for characters and time series.

    >>> load("digits")
    Dataset('digits': 1,437 + 360 of 1×8×8, 10 classes)
    """
    entry = lookup(name)
    entry.check_options(options)
    arrays, _ = entry.read(root)
    make_dataset: Callable[..., Dataset] = entry.dataset
    return make_dataset(arrays, **options)


def verify(name: str | Source, root: PathLike | None = None) -> Report:
    """Check every byte of a stored data set and report what it was compared with.

    Raises ``DataError`` if the data set is absent or damaged.
    """
    return lookup(name).read(root)[1]


def listing(root: PathLike | None = None) -> list[Listing]:
    """List all data sets and whether they are on this machine.

    Values are not read: ``present`` means that the file has the right structure, not that its content is right.
    """
    return [Listing(entry.name, entry.title, entry.size, entry.state(root), entry.note) for entry in DATASETS.values()]
