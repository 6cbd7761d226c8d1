//! Stand-ins that a key decides. Addresses with the same first bits have stand-ins with the same first bits, however many they are.
//!
//! Each bit of an address is turned or not by a keyed hash of the bits before it (Xu, Fan, Ammar, Moon: Prefix-preserving IP address anonymization, 2002). So every subnet
//! remains one with its own prefix length, and ranges that hold each other still do. Bits that tell the kind of an address are kept, and so is its last byte.

use std::net::{Ipv4Addr, Ipv6Addr};

/// A secret that decides the stand-ins. Recordings that were redacted with the same word have the same.
#[derive(Clone, Debug)]
pub(super) struct Key([u64; 2]);

impl Key {
    pub(super) fn new(word: &str) -> Self {
        let half = |first| sip([first, 0], word.as_bytes());
        Self([half(1), half(2)])
    }

    /// Returns `letters` letters for a name. `kind` tells names of hosts, users and domains apart.
    pub(super) fn letters(&self, kind: &str, name: &str, letters: usize) -> String {
        let mut hash = self.hash(kind, name.as_bytes());
        let letter = |_| {
            let letter = b'a' + u8::try_from(hash % 26).unwrap_or_default();
            hash /= 26;
            char::from(letter)
        };
        (0..letters).map(letter).collect()
    }

    pub(super) fn ipv4(&self, address: Ipv4Addr) -> Ipv4Addr {
        let kept = match address.octets() {
            // This host, loopback, multicast, reserved, and masks.
            [0 | 127 | 224.., ..] => return address,
            [172, 16..32, ..] => 12,
            [100, 64..128, ..] => 10,
            // Otherwise an address of one kind could become one of another.
            [100 | 169 | 172 | 192, ..] => 16,
            _ => 8,
        };
        let bits = u64::from(address.to_bits()) << 32;
        let turned = self.turned("ipv4", bits, |at, _| (kept..24).contains(&at), Some(kept));
        Ipv4Addr::from_bits(u32::try_from(turned >> 32).unwrap_or_default())
    }

    pub(super) fn ipv6(&self, address: Ipv6Addr) -> Ipv6Addr {
        if let Some(mapped) = address.to_ipv4_mapped() {
            return self.ipv4(mapped).to_ipv6_mapped();
        }
        let kept = match address.segments()[0] {
            0xff00.. => return address,
            // Link-local, of which the network has no other bits.
            0xfe80..=0xfebf => 64,
            // Beside them: site-local, which are no longer used.
            0xfe00..=0xfeff => 10,
            // Global addresses.
            0x2000..=0x3fff => 3,
            // Local ones, and those that are reserved: so that none becomes one of another kind.
            _ => 8,
        };
        let (high, low) = ((address.to_bits() >> 64) as u64, address.to_bits() as u64);
        let high = self.turned("ipv6", high, |at, before| at >= kept && before != 0, None);
        Ipv6Addr::from_bits(u128::from(high) << 64 | u128::from(self.guid(low)))
    }

    /// Returns the stand-in of a GUID, or of the second half of an IPv6 address, which is the GUID in a GID of InfiniBand. Small numbers stay: they tell nothing.
    pub(super) fn guid(&self, guid: u64) -> u64 {
        self.turned("guid", guid, |at, before| at < 56 && before != 0, None)
    }

    /// Returns the stand-in of a MAC, which keeps the bits for groups and for local administration.
    pub(super) fn mac(&self, mac: [u8; 6]) -> [u8; 6] {
        if matches!(mac, [0, 0, 0, 0, 0, 0] | [0xff, 0xff, 0xff, 0xff, 0xff, 0xff]) {
            return mac;
        }
        let [a, b, c, d, e, f] = mac;
        let bits = u64::from_be_bytes([a, b, c, d, e, f, 0, 0]);
        let turned = self.turned("mac", bits, |at, _| at < 40 && !matches!(at, 6 | 7), Some(8)).to_be_bytes();
        [turned[0], turned[1], turned[2], turned[3], turned[4], turned[5]]
    }

    /// Turns bits. `may` says whether one may be turned, given its place and the bits before it; the one at `always` is.
    fn turned(&self, kind: &str, bits: u64, may: impl Fn(u32, u64) -> bool, always: Option<u32>) -> u64 {
        let mut turned = bits;
        for at in 0..64 {
            let before = if at == 0 { 0 } else { bits >> (64 - at) };
            let turn =
                || always == Some(at) || self.hash(kind, &[&[at as u8][..], &before.to_le_bytes()].concat()) & 1 == 1;
            if may(at, before) && turn() {
                turned ^= 1 << (63 - at);
            }
        }
        turned
    }

    fn hash(&self, kind: &str, bytes: &[u8]) -> u64 {
        sip(self.0, &[kind.as_bytes(), &[0], bytes].concat())
    }
}

/// SipHash-2-4 (Aumasson, Bernstein 2012). That of the standard library may change with its version, and stand-ins must not.
fn sip([k0, k1]: [u64; 2], bytes: &[u8]) -> u64 {
    let mut state = [
        k0 ^ 0x736f_6d65_7073_6575,
        k1 ^ 0x646f_7261_6e64_6f6d,
        k0 ^ 0x6c79_6765_6e65_7261,
        k1 ^ 0x7465_6462_7974_6573,
    ];
    let mut absorb = |word: u64| {
        state[3] ^= word;
        rounds(&mut state, 2);
        state[0] ^= word;
    };
    let words = bytes.chunks_exact(8);
    let mut last = [0; 8];
    last[..words.remainder().len()].copy_from_slice(words.remainder());
    last[7] = bytes.len() as u8;
    for word in words {
        absorb(u64::from_le_bytes(word.try_into().expect("chunks of 8 bytes")));
    }
    absorb(u64::from_le_bytes(last));
    state[2] ^= 0xff;
    rounds(&mut state, 4);
    state[0] ^ state[1] ^ state[2] ^ state[3]
}

fn rounds(state: &mut [u64; 4], rounds: u32) {
    let [mut a, mut b, mut c, mut d] = *state;
    for _ in 0..rounds {
        a = a.wrapping_add(b);
        b = b.rotate_left(13) ^ a;
        a = a.rotate_left(32);
        c = c.wrapping_add(d);
        d = d.rotate_left(16) ^ c;
        a = a.wrapping_add(d);
        d = d.rotate_left(21) ^ a;
        c = c.wrapping_add(b);
        b = b.rotate_left(17) ^ c;
        c = c.rotate_left(32);
    }
    *state = [a, b, c, d];
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_hash_is_that_of_its_authors() {
        // Appendix A of the paper.
        let key = [0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908];
        let bytes: Vec<u8> = (0..15).collect();
        assert_eq!(sip(key, &bytes), 0xa129_ca61_49be_45e5);
    }

    #[test]
    fn the_kind_of_an_address_stays() {
        for word in ["a", "b", "c", "d", "e"] {
            let key = Key::new(word);
            for same in ["0.0.0.0", "127.0.0.1", "127.0.1.1", "255.255.255.0", "224.0.0.1"] {
                let address: Ipv4Addr = same.parse().expect("an address");
                assert_eq!(key.ipv4(address), address);
            }
            for same in ["::", "::1", "ff02::1", "fe80::1", "fe80::"] {
                let address: Ipv6Addr = same.parse().expect("an address");
                assert_eq!(key.ipv6(address), address);
            }
            for text in ["10.1.2.3", "172.17.0.2", "192.168.1.9", "169.254.7.7", "100.64.0.1", "8.8.8.8", "172.200.1.1"]
            {
                let address: Ipv4Addr = text.parse().expect("an address");
                let other = key.ipv4(address);
                assert_ne!(other, address);
                assert_eq!(other.octets()[3], address.octets()[3]);
                assert_eq!(
                    (other.is_private(), other.is_link_local()),
                    (address.is_private(), address.is_link_local())
                );
                assert_eq!(key.ipv6(address.to_ipv6_mapped()), other.to_ipv6_mapped());
            }
            let link_local = key.ipv6("fe80::bace:f6ff:fe0a:1000".parse().expect("an address"));
            assert_eq!(link_local.segments()[..4], [0xfe80, 0, 0, 0]);
            assert_eq!(key.guid(0xbace_f6ff_fe0a_1000), link_local.to_bits() as u64);
            assert_eq!(key.mac([2, 0, 0, 0, 0, 1])[0] & 3, 2);
        }
    }

    proptest! {
        #[test]
        fn subnets_stay_subnets(word in "[a-z]{1,4}", a: u32, b: u32, prefix in 0_u32..32) {
            let key = Key::new(&word);
            let b = if prefix == 0 { b } else { a & (u32::MAX << (32 - prefix)) | b & (u32::MAX >> prefix) };
            let (to_a, to_b) = (key.ipv4(Ipv4Addr::from_bits(a)).to_bits(), key.ipv4(Ipv4Addr::from_bits(b)).to_bits());
            prop_assert_eq!((a ^ b).leading_zeros(), (to_a ^ to_b).leading_zeros());
        }

        #[test]
        fn subnets_of_ipv6_stay_subnets(word in "[a-z]{1,4}", a: u128, b: u128, prefix in 0_u32..128) {
            let key = Key::new(&word);
            let b = if prefix == 0 { b } else { a & (u128::MAX << (128 - prefix)) | b & (u128::MAX >> prefix) };
            let (to_a, to_b) = (key.ipv6(Ipv6Addr::from_bits(a)).to_bits(), key.ipv6(Ipv6Addr::from_bits(b)).to_bits());
            prop_assert_eq!((a ^ b).leading_zeros(), (to_a ^ to_b).leading_zeros());
        }
    }
}
