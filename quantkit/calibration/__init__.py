"""Calibration of FP8 KV caches: real text through a checkpoint, one layer at a time, and scales that are worth having.

data        samples to sequences of tokens
streaming   sequences through one layer after the other
recording   what attention handles, noted while it runs
choosing    powers of two by the error that they leave
run         `calibrate`: all of it, resumable
"""

from quantkit.calibration.data import DataOptions as DataOptions
from quantkit.calibration.report import CalibrationReport as CalibrationReport
from quantkit.calibration.run import Options as Options
from quantkit.calibration.run import calibrate as calibrate
