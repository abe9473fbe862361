"""What workflows report.

checkpoints  conversions, inspections and manifests
verifying    `verify`
accuracy     evaluations
"""

from quantkit.records import Report as Report
from quantkit.report.accuracy import AccuracyReport as AccuracyReport
from quantkit.report.accuracy import Comparison as Comparison
from quantkit.report.accuracy import DistributionReport as DistributionReport
from quantkit.report.accuracy import PositionRange as PositionRange
from quantkit.report.accuracy import Verdict as Verdict
from quantkit.report.checkpoints import File as File
from quantkit.report.checkpoints import Fold as Fold
from quantkit.report.checkpoints import Group as Group
from quantkit.report.checkpoints import Holding as Holding
from quantkit.report.checkpoints import Inspection as Inspection
from quantkit.report.checkpoints import LayerGroup as LayerGroup
from quantkit.report.checkpoints import MadeFrom as MadeFrom
from quantkit.report.checkpoints import Manifest as Manifest
from quantkit.report.checkpoints import ModelIdentity as ModelIdentity
from quantkit.report.checkpoints import Origin as Origin
from quantkit.report.verifying import Check as Check
from quantkit.report.verifying import RoleError as RoleError
from quantkit.report.verifying import TensorError as TensorError
from quantkit.report.verifying import Verification as Verification
