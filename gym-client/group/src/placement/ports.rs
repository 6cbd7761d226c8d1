//! Port ranges with the assignment of NeMo RL: all below 9000, where some systems begin to assign ports automatically.

use std::ops::Range;

/// Rendezvous of worker groups, unless the cluster sets its own range.
pub const MASTER_PORTS: Range<u16> = 1400..1999;
/// HTTP servers of generation engines.
pub const GENERATION_PORTS: Range<u16> = 3000..5000;
/// HTTP servers of environments, agents and models.
pub const GYM_PORTS: Range<u16> = 5000..6000;
/// Rendezvous within generation engines, up to eight on a node.
pub const ENGINE_PORTS: Range<u16> = 7000..7800;
/// Number of [`ENGINE_PORTS`] reserved for each engine.
pub const ENGINE_PORTS_EACH: u16 = 100;

/// Returns the first rendezvous port of the engine on these bundles, by its position among the engines of its node. Returns
/// `None` without bundles, and if the port is beyond [`ENGINE_PORTS`]. An engine that spans nodes has the first position.
#[must_use]
pub fn engine_port(bundles: &[u32], gpus_per_node: u32) -> Option<u16> {
    let first = bundles.first()?;
    let size = u32::try_from(bundles.len()).ok()?;
    let slot = if size > gpus_per_node { 0 } else { first % gpus_per_node / size };
    let port = u16::try_from(slot).ok()?.checked_mul(ENGINE_PORTS_EACH)?.checked_add(ENGINE_PORTS.start)?;
    ENGINE_PORTS.contains(&port).then_some(port)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c177_engines_of_a_node_are_a_hundred_ports_apart() {
        assert_eq!(engine_port(&[0], 8), Some(7000));
        assert_eq!(engine_port(&[1], 8), Some(7100));
        assert_eq!(engine_port(&[3], 8), Some(7300));
        assert_eq!(engine_port(&[4, 5, 6, 7], 8), Some(7100));
        assert_eq!(engine_port(&[6, 7], 8), Some(7300));
    }

    #[test]
    fn c178_an_engine_that_spans_nodes_has_the_first_place() {
        assert_eq!(engine_port(&(16..32).collect::<Vec<_>>(), 8), Some(7000));
        assert_eq!(engine_port(&[3], 4), Some(7300));
        assert_eq!(engine_port(&(8..16).collect::<Vec<_>>(), 4), Some(7000));
        assert_eq!(engine_port(&[], 8), None);
        assert_eq!(engine_port(&[12], 16), None);
    }

    #[test]
    fn c179_the_bands_do_not_meet() {
        let bands = [MASTER_PORTS, GENERATION_PORTS, GYM_PORTS, ENGINE_PORTS];
        assert!(bands.windows(2).all(|pair| pair[0].end <= pair[1].start));
        assert!(bands.iter().all(|band| band.start > 1024 && band.end <= 8600));
        assert_eq!(ENGINE_PORTS.len(), 8 * usize::from(ENGINE_PORTS_EACH));
    }
}
